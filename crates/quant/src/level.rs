//! Code that is compiled for more than the least processor of its kind, chosen when it runs.
//!
//! Sums and products of floats are never fused, so that a level changes the time and no bit.

/// `at_level!(level, simd => work)` does `work` with the vectors of `level`, of which `simd` is the token: those of
/// AVX2 or, on any x86-64, SSE2. What is to be compiled for them must be `#[inline(always)]` all the way down, closures
/// too.
macro_rules! at_level {
    ($level:expr, $simd:pat => $work:expr) => {{
        let level: fearless_simd::Level = $level;
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = level.as_avx2() {
            let $simd = avx2;
            fearless_simd::Simd::vectorize(
                avx2,
                #[inline(always)]
                || $work,
            )
        } else {
            let $simd = level.as_sse2().expect("every x86-64 has SSE2");
            $work
        }
        #[cfg(not(target_arch = "x86_64"))]
        fearless_simd::dispatch!(level, $simd => $work)
    }};
}

pub(crate) use at_level;
