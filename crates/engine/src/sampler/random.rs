//! PCG32 (XSH RR 64/32), after M. O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms
//! for Random Number Generation", 2014. Integer arithmetic only, so every platform draws the same numbers.

const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// The generator.
#[derive(Debug, Clone)]
pub struct Pcg32(u64);

impl Pcg32 {
    /// Seeded as in the reference implementation.
    pub fn new(seed: u64) -> Pcg32 {
        let mut r = Pcg32(INCREMENT.wrapping_add(seed));
        r.next();
        r
    }

    /// Returns the next 32 bits.
    pub fn next(&mut self) -> u32 {
        let old = self.0;
        self.0 = old.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
        ((((old >> 18) ^ old) >> 27) as u32).rotate_right((old >> 59) as u32)
    }

    /// In [0, 1), with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        let (a, b) = (u64::from(self.next()) >> 5, u64::from(self.next()) >> 6);
        ((a << 26) | b) as f64 / (1u64 << 53) as f64
    }
}
