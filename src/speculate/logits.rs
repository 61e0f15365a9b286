//! Scans over one row of logits, written in blocks so that the compiler vectorises them.
//!
//! Ties go to the lower id everywhere, and NaN never wins.

/// Values compared together before a single one is looked at.
const BLOCK: usize = 64;
const LANES: usize = 16;

/// Largest value of a row; negative infinity when there is none.
pub fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &v| if v > best { v } else { best })
}

/// Id of the largest value; 0 when no value is above negative infinity.
pub fn argmax(row: &[f32]) -> u32 {
    let mut best = f32::NEG_INFINITY;
    let mut start = 0;
    for (index, block) in row.chunks(BLOCK * 4).enumerate() {
        let value = max(block);
        if value > best {
            best = value;
            start = index * BLOCK * 4;
        }
    }
    let within = row[start..].iter().position(|&value| value == best).unwrap_or(0);
    (start + within) as u32
}

/// The `k` largest values with their ids, largest first.
pub fn top_k(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(k + 1);
    if k == 0 {
        return best;
    }
    let mut threshold = f32::NEG_INFINITY;
    for (index, block) in row.chunks(BLOCK).enumerate() {
        if best.len() == k && max(block) <= threshold {
            continue;
        }
        for (offset, &value) in block.iter().enumerate() {
            if value.is_nan() || (best.len() == k && value <= threshold) {
                continue;
            }
            let place = best.partition_point(|&(_, held)| held >= value);
            best.insert(place, ((index * BLOCK + offset) as u32, value));
            best.truncate(k);
            if best.len() == k {
                threshold = best[k - 1].1;
            }
        }
    }
    best
}

/// `ln(sum(exp(row)))`, the constant that turns logits into log-probabilities.
pub fn log_sum_exp(row: &[f32]) -> f32 {
    let largest = max(row);
    if !largest.is_finite() {
        return largest;
    }
    let mut total = 0f64;
    for block in row.chunks(BLOCK * 16) {
        let mut lanes = [0f32; LANES];
        let chunks = block.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane += exp(value - largest);
            }
        }
        total += lanes.iter().map(|&v| f64::from(v)).sum::<f64>();
        total += rest.iter().map(|&v| f64::from(exp(v - largest))).sum::<f64>();
    }
    largest + total.ln() as f32
}

/// Place of `id` in the row's order, counted from 1.
pub fn rank(row: &[f32], id: u32) -> u32 {
    let value = row[id as usize];
    let (before, after) = row.split_at(id as usize);
    let ahead = before.iter().map(|&v| u32::from(v >= value)).sum::<u32>();
    1 + ahead + after.iter().map(|&v| u32::from(v > value)).sum::<u32>()
}

/// `e^x` for `x <= 0`, with a relative error below 3e-7; 0 below -87.
///
/// The standard library's version is a call for each value, which at a vocabulary's length costs
/// more than the rest of sampling together.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = (x - power * LN_2_HIGH) - power * LN_2_LOW;
    let poly = 1.0 / 720.0;
    let poly = poly * r + 1.0 / 120.0;
    let poly = poly * r + 1.0 / 24.0;
    let poly = poly * r + 1.0 / 6.0;
    let poly = poly * r + 0.5;
    let poly = poly * r + 1.0;
    let poly = poly * r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if x < -87.0 { 0.0 } else { poly * f32::from_bits(exponent) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn random_row(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..len).map(|_| rng.random_range(-12.0..12.0)).collect()
    }

    #[test]
    fn exp_is_as_exact_as_f32_allows() {
        for step in 0..87_000 {
            let x = -(step as f32) / 1000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(((got - want) / want).abs() < 3e-7, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
    }

    #[test]
    fn scans_agree_with_a_full_sort() {
        for (len, seed) in [(1, 1), (7, 2), (64, 3), (65, 4), (1000, 5), (49_152, 6)] {
            let row = random_row(len, seed);
            let mut order: Vec<u32> = (0..len as u32).collect();
            order.sort_by(|&a, &b| {
                row[b as usize].total_cmp(&row[a as usize]).then_with(|| a.cmp(&b))
            });
            assert_eq!(argmax(&row), order[0]);
            let k = 20.min(len);
            let ids: Vec<u32> = top_k(&row, 20).into_iter().map(|(id, _)| id).collect();
            assert_eq!(ids, order[..k]);
            for (place, &id) in order.iter().enumerate().take(50) {
                assert_eq!(rank(&row, id), place as u32 + 1);
            }
            let want: f64 = row.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln();
            assert!((f64::from(log_sum_exp(&row)) - want).abs() < 1e-5);
        }
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let mut row = vec![0.0; 300];
        row[70] = 5.0;
        row[299] = 5.0;
        assert_eq!(argmax(&row), 70);
        assert_eq!(top_k(&row, 3), [(70, 5.0), (299, 5.0), (0, 0.0)]);
        assert_eq!((rank(&row, 70), rank(&row, 299), rank(&row, 0)), (1, 2, 3));
    }

    #[test]
    fn nan_and_infinity_do_not_win() {
        let row = [f32::NAN, f32::NEG_INFINITY, 1.0, f32::NAN];
        assert_eq!(argmax(&row), 2);
        assert_eq!(top_k(&row, 2)[0], (2, 1.0));
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), 0);
    }
}
