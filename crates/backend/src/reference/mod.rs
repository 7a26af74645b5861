//! The reference interpreter: plans in plain f32, from dequantised weights.
