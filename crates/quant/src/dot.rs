//! The scalar dot products: the reference of the CPU law.

/// Sums 16 lanes by the fixed tree: lane `i` takes lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
///
/// This is the order in which a 512-bit register folds onto its own halves, and two 256-bit registers onto one.
pub fn tree_sum(lanes: &[f32; 16]) -> f32 {
    let mut s = *lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            s[i] += s[i + half];
        }
    }
    s[0]
}
