//! Arithmetic on slices, compiled for several instruction sets of one processor family and chosen
//! at run time.
//!
//! Every function treats its rows one by one and in one fixed order, so a row's result does not
//! depend on its neighbours. This is the only module with `unsafe`: calls into functions that
//! need processor features, each right after the check that they are there; the loads of the
//! integer kernels, whose bounds are asserted on entry; and the matrix product, whose pieces are
//! disjoint.

#![allow(unsafe_code)]

#[inline]
fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether [`matmul_panels`] is the fast way here: AVX-512 with byte products (VNNI).
pub fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Defines a safe function whose body is compiled for AVX2 + FMA as well as for the baseline.
macro_rules! multiversion {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                if has_avx2() {
                    // SAFETY: the features were detected on the line above.
                    return unsafe { wide($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod backward;
mod float;
mod matrix;
mod quantized;

pub use backward::{AdamWStep, adamw, rms_norm_backward, silu_mul_backward};
pub use float::{
    HeadRows, Scores, add_scaled, argmax, attend, dot, gelu_mul, layer_norm, rms_norm, silu_mul,
    softcap, softmax,
};
pub use matrix::{Matrix, MatrixMut, Write, matmul, matmul_serial};
pub use quantized::{
    BLOCK, PANEL, PanelRows, matmul_panels, matmul_q8, pack_panels, quantize, sum,
};

/// Values that are summed side by side, in any order of instructions.
const LANES: usize = 8;

/// `exp` to about 2 ulp, branch-free so that it vectorises (Cephes' polynomial).
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low bits
    let x = x.clamp(-87.3, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    (p * r * r + r + 1.0) * scale
}

#[cfg(test)]
mod tests;
