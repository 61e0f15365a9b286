//! Floats: backwards of the forward kernels, and the optimizer.

use super::{LANES, exp, has_avx2};

multiversion! {
    /// Gradients of [`super::silu_mul`]'s result with respect to both factors, for its gradient `g`.
    pub fn silu_mul_backward(
        gate: &[f32],
        up: &[f32],
        g: &[f32],
        d_gate: &mut [f32],
        d_up: &mut [f32],
    ) {
        let inputs = gate.iter().zip(up).zip(g);
        for (((gate, up), g), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
            let sigmoid = 1.0 / (1.0 + exp(-*gate));
            *d_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
            *d_up = g * gate * sigmoid;
        }
    }
}

multiversion! {
    /// Gradients of [`super::rms_norm`] for its result's gradient `g`. With r = (mean(x²) + eps)^-½ and
    /// n = x·r: `d_x := r·(g·gain − n·mean(g·gain·n))`, `d_gain += g·n`.
    pub fn rms_norm_backward(
        x: &[f32],
        gain: &[f32],
        g: &[f32],
        eps: f32,
        d_x: &mut [f32],
        d_gain: &mut [f32],
    ) {
        let (mut squares, mut along) = ([0f32; LANES], [0f32; LANES]);
        let (x_chunks, x_rest) = x.as_chunks::<LANES>();
        let (gain_chunks, gain_rest) = gain.as_chunks::<LANES>();
        let (g_chunks, g_rest) = g.as_chunks::<LANES>();
        for ((x, gain), g) in x_chunks.iter().zip(gain_chunks).zip(g_chunks) {
            for lane in 0..LANES {
                squares[lane] += x[lane] * x[lane];
                along[lane] += g[lane] * gain[lane] * x[lane];
            }
        }
        let (mut square, mut product) = (0f32, 0f32);
        for lane in 0..LANES {
            square += squares[lane];
            product += along[lane];
        }
        for ((x, gain), g) in x_rest.iter().zip(gain_rest).zip(g_rest) {
            square += x * x;
            product += g * gain * x;
        }
        let count = x.len() as f32;
        let r = 1.0 / (square / count + eps).sqrt();
        let mean = product * r / count;
        let inputs = x.iter().zip(gain).zip(g);
        for (((x, gain), g), (d_x, d_gain)) in inputs.zip(d_x.iter_mut().zip(d_gain)) {
            let n = x * r;
            *d_x = r * (g * gain - n * mean);
            *d_gain += g * n;
        }
    }
}

/// One step of AdamW with its bias corrections worked in.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    pub beta1: f32,
    pub beta2: f32,
    /// The gradient is multiplied by this first.
    pub scale: f32,
    /// Step size over `1 - beta1^t`.
    pub rate: f32,
    /// `1 / (1 - beta2^t)`.
    pub second_correction: f32,
    pub eps: f32,
    /// `1 - step size * weight decay`.
    pub decay: f32,
}

multiversion! {
    /// Updates a parameter `p` and its moments `m` and `v` with its gradient `g`.
    pub fn adamw(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], step: &AdamWStep) {
        let (keep1, keep2) = (1.0 - step.beta1, 1.0 - step.beta2);
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = step.scale * g;
            *m = step.beta1 * *m + keep1 * g;
            *v = step.beta2 * *v + keep2 * g * g;
            let root = (*v * step.second_correction).sqrt() + step.eps;
            *p = step.decay * *p - step.rate * *m / root;
        }
    }
}
