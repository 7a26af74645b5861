//! Token choice until the sampler chain takes over: the most likely token, or Gumbel noise at a temperature.

/// How a token is chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplerParams {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Start of the random numbers.
    pub seed: u64,
}

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A parameter is out of range.
    #[error("submit request: {name} is {value}, it must be finite and not negative")]
    Param {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f32,
    },
    /// The logits hold NaN.
    #[error("sample token: the logit of token {0} is NaN")]
    Nan(usize),
}

/// Chooses tokens of one request.
pub(crate) struct Sampler {
    params: SamplerParams,
    state: u64,
}

pub(crate) struct Sampled {
    pub token: u32,
    pub logprob: f32,
}

impl Sampler {
    pub fn new(params: SamplerParams) -> Result<Sampler, SamplerError> {
        if !(params.temperature >= 0.0 && params.temperature.is_finite()) {
            return Err(SamplerError::Param { name: "temperature", value: params.temperature });
        }
        Ok(Sampler { state: params.seed, params })
    }

    pub fn accept(&mut self, _token: u32) {}

    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SamplerError> {
        if let Some(i) = logits.iter().position(|l| l.is_nan()) {
            return Err(SamplerError::Nan(i));
        }
        let mut best = (f32::NEG_INFINITY, 0);
        for (i, &logit) in logits.iter().enumerate() {
            let noise = if self.params.temperature > 0.0 { -(-self.uniform().ln()).ln() } else { 0.0 };
            let score = logit + self.params.temperature * noise;
            if score > best.0 {
                best = (score, i);
            }
        }
        Ok(Sampled { token: best.1 as u32, logprob: logits[best.1] - log_sum_exp(logits) })
    }

    pub fn logprobs(&self, logits: &[f32], n: usize, out: &mut Vec<(u32, f32)>) -> Result<(), SamplerError> {
        let sum = log_sum_exp(logits);
        let start = out.len();
        for (i, &logit) in logits.iter().enumerate() {
            let logprob = logit - sum;
            let at = start + out[start..].partition_point(|&(_, better)| better >= logprob);
            if at < start + n {
                out.truncate(start + n - 1);
                out.insert(at, (i as u32, logprob));
            }
        }
        Ok(())
    }

    /// In (0, 1), by splitmix64.
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 41) as f32 / (1u64 << 23) as f32 + f32::EPSILON / 4.0
    }
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|&l| (l - max).exp()).sum::<f32>().ln()
}
