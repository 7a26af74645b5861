//! What steps cost by their number of tokens, as measured, and how many tokens one may have.
//!
//! Knows no clock, no sequences and no devices: times are numbers that the engine measures. They decide when tokens are
//! computed, and never which.

use std::time::Duration;

/// Sizes of steps are told apart by half powers of two.
const N_SIZES: usize = 48;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.25;
/// Largest factor by which one measurement may differ from what was known: beyond it is chance.
const MAX_JUMP: f64 = 4.0;
/// By how much a size is believed to be faster with every step, while its tokens are said to cost more than those of a
/// smaller one: a large step costs no more than the small ones it could be, so it is tried again.
const HOPE: f64 = 0.99;
/// Prompt tokens of a step of which no cost is known, and the fewest that a step has.
const FIRST: usize = 32;
const FEWEST: usize = 8;

/// What a step's prompt tokens make others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Company {
    /// Answers run: each step is a gap between their tokens.
    Answers,
    /// Further prompts are there.
    Prompts,
    /// Nothing is, but a request may come.
    Nothing,
}

impl Company {
    /// Longest step, in units of the target; and how much slower a token may be than in the best steps for it.
    fn terms(self) -> (f64, f64) {
        match self {
            Company::Answers => (1.0, 4.0),
            Company::Prompts => (5.0, 1.5),
            Company::Nothing => (10.0, 1.1),
        }
    }
}

/// A moving estimate of the seconds a token costs, by the size of the step.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Target of a step's time in seconds; infinite where steps have no bound.
    target: f64,
    /// Seconds per token of steps of each size; 0 where none was measured.
    seconds: [f64; N_SIZES],
    /// Whether a step of each size was computed: the first one may load weights or kernels, and is not measured.
    is_warm: [bool; N_SIZES],
}

impl Pace {
    pub fn new(target: Duration) -> Pace {
        let target = if target == Duration::MAX { f64::INFINITY } else { target.as_secs_f64() };
        Pace { target, seconds: [0.0; N_SIZES], is_warm: [false; N_SIZES] }
    }

    /// A step of `n` tokens took this long.
    ///
    /// What was not measured lately changes by the same factor: longer contexts and a busy machine slow all steps.
    pub fn observe(&mut self, n: usize, time: Duration) {
        let (size, now) = (size_of(n), time.as_secs_f64().max(1e-9) / n.max(1) as f64);
        if !std::mem::replace(&mut self.is_warm[size], true) && self.seconds.iter().any(|&s| s > 0.0) {
            return;
        }
        let known = self.seconds[size];
        if known == 0.0 {
            self.seconds[size] = now;
            return;
        }
        let now = now.clamp(known / MAX_JUMP, known * MAX_JUMP);
        // A product of such factors does not drift where steps of a size are slow and fast alternately.
        let factor = (now / known).powf(NEWEST);
        let mut best = f64::INFINITY;
        for seconds in self.seconds.iter_mut().filter(|seconds| **seconds > 0.0) {
            *seconds *= factor;
            if *seconds > best {
                *seconds = (*seconds * HOPE).max(best);
            }
            best = best.min(*seconds);
        }
    }

    /// Returns how many prompt tokens a step may have that decodes `n_decoding`: at most `max`, which is at least 1.
    ///
    /// A step takes no longer than the target, or twice as long as its decoding alone; longer where very many sequences
    /// decode, of which each waited for such prompts itself. Where so small a step computes tokens at a fraction of
    /// their full speed, as with many experts, it has more, within four times the target.
    pub fn prompt_tokens(&self, n_decoding: usize, max: usize, company: Company) -> usize {
        if self.target.is_infinite() {
            return max;
        }
        let best = self.seconds.iter().copied().filter(|&s| s > 0.0).fold(f64::INFINITY, f64::min);
        if best.is_infinite() {
            return if company == Company::Nothing { max } else { FIRST.min(max) };
        }
        let (factor, max_loss) = company.terms();
        let alone = if n_decoding > 0 { n_decoding as f64 * self.seconds(size_of(n_decoding)) } else { 0.0 };
        let limit = (self.target * factor * crowd(n_decoding)).max(2.0 * alone);
        let most = n_decoding + max;
        let mut n = self.within(limit, most);
        while n < most && self.seconds(size_of(n)) > best * max_loss {
            n = (2 * n).min(most);
        }
        if company == Company::Answers {
            n = n.min(self.within(4.0 * limit, most));
        }
        n.saturating_sub(n_decoding).max(FEWEST).min(max)
    }

    /// Returns the largest step of up to `most` tokens that takes no longer than `limit` seconds, at least 1.
    fn within(&self, limit: f64, most: usize) -> usize {
        let fits = |size: usize| {
            let n = (limit / self.seconds(size)).min(most as f64) as usize;
            (n >= least_of(size)).then(|| n.min(least_of(size + 1) - 1).max(1))
        };
        (0..=size_of(most)).rev().find_map(fits).unwrap_or(1)
    }

    /// Seconds per token of a size: measured, else between the nearest that were. Something was.
    fn seconds(&self, size: usize) -> f64 {
        let is_known = |&i: &usize| self.seconds[i] > 0.0;
        let (below, above) = ((0..=size).rev().find(is_known), (size..N_SIZES).find(is_known));
        match (below, above) {
            (Some(a), Some(b)) if a < b => {
                let share = (size - a) as f64 / (b - a) as f64;
                self.seconds[a].powf(1.0 - share) * self.seconds[b].powf(share)
            }
            (Some(at), _) | (None, Some(at)) => self.seconds[at],
            (None, None) => f64::INFINITY,
        }
    }
}

/// Returns how much longer than the target a step may take that decodes N sequences.
fn crowd(n_decoding: usize) -> f64 {
    /// Sequences up to which it takes no longer, and from which it takes twice as long.
    const FEW: usize = 32;
    const MANY: usize = 128;
    1.0 + n_decoding.saturating_sub(FEW) as f64 / (MANY - FEW) as f64
}

/// Returns the size of a step of `n` tokens: two a power of two.
fn size_of(n: usize) -> usize {
    let n = n.clamp(1, 1 << (N_SIZES / 2));
    let whole = n.ilog2() as usize;
    let is_upper = n >= least_of(2 * whole + 1);
    (2 * whole + usize::from(is_upper)).min(N_SIZES - 1)
}

/// Returns the fewest tokens of a size.
fn least_of(size: usize) -> usize {
    let whole = 1 << (size / 2);
    // 181/128 is a little less than the root of 2.
    if size.is_multiple_of(2) { whole } else { (whole * 181usize).div_ceil(128) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(100);

    /// A machine on which a step of `n` tokens takes `base` and `each` of them more, in milliseconds.
    fn settled(pace: &mut Pace, n_decoding: usize, company: Company, cost: impl Fn(usize) -> f64) -> usize {
        let mut n = 0;
        for _ in 0..60 {
            n = pace.prompt_tokens(n_decoding, 512 - n_decoding, company);
            let time = Duration::from_secs_f64(cost(n + n_decoding) / 1e3);
            pace.observe(n + n_decoding, time);
            pace.observe(n_decoding.max(1), Duration::from_secs_f64(cost(n_decoding.max(1)) / 1e3));
        }
        n
    }

    #[test]
    fn sizes_have_no_gaps() {
        for n in 1..5000 {
            let size = size_of(n);
            assert!(least_of(size) <= n && n < least_of(size + 1), "{n}: {size}");
        }
        assert_eq!(size_of(usize::MAX), N_SIZES - 1);
    }

    /// The step's time settles at the target, whatever the machine, where full steps would take seconds.
    #[test]
    fn steps_settle_at_the_target() {
        for (base, each) in [(15.0, 7.0), (2.0, 1.0), (20.0, 0.3), (90.0, 2.0)] {
            let cost = |n: usize| base + each * n as f64;
            let mut pace = Pace::new(TARGET);
            let n = settled(&mut pace, 1, Company::Answers, cost);
            let limit = 100f64.max(2.0 * cost(1));
            assert!(cost(n + 1) <= 1.1 * limit.max(cost(FEWEST + 1)), "{base} + {each} n: {n} take {}", cost(n + 1));
            assert!(n == 511 || cost(n + 1) >= 0.6 * limit, "{base} + {each} n: {n} take {}", cost(n + 1));
            // As much slower as the machine gets, as many fewer there are.
            let slower = settled(&mut pace, 1, Company::Answers, |n| 2.0 * cost(n));
            assert!(slower <= n.max(FEWEST), "{slower} of {n}");
        }
    }

    /// Without answers steps are long, and whole where they are not longer than a second.
    #[test]
    fn a_prompt_without_company_gets_large_steps() {
        for (each, expected) in [(1.0, 512..=512), (7.0, 110..=150)] {
            let n = settled(&mut Pace::new(TARGET), 0, Company::Nothing, |n| 5.0 + each * n as f64);
            assert!(expected.contains(&n), "{each} ms a token: {n}");
        }
        let n = settled(&mut Pace::new(TARGET), 0, Company::Prompts, |n| 5.0 + 7.0 * n as f64);
        assert!((50..=75).contains(&n), "{n}");
        assert_eq!(Pace::new(Duration::MAX).prompt_tokens(3, 500, Company::Answers), 500);
        assert_eq!(Pace::new(TARGET).prompt_tokens(3, 500, Company::Answers), FIRST);
        assert_eq!(Pace::new(TARGET).prompt_tokens(0, 500, Company::Nothing), 500);
    }

    /// Where a step reads all experts for a few tokens, small ones would cost prompts their speed.
    #[test]
    fn small_steps_keep_a_quarter_of_the_speed() {
        // A token uses 8 of 128 experts; reading all of them takes 800 ms.
        let cost = |n: usize| 10.0 * n as f64 + 800.0 * (1.0 - (1.0f64 - 8.0 / 128.0).powi(n as i32)) + 20.0;
        let mut pace = Pace::new(TARGET);
        assert_eq!(settled(&mut pace, 0, Company::Nothing, cost), 512);
        let n = settled(&mut pace, 1, Company::Answers, cost);
        let loss = cost(n + 1) / (n + 1) as f64 / (cost(512) / 512.0);
        assert!(loss < 5.0 && cost(n + 1) < 4.5 * 170.0, "{n} tokens, {} ms, {loss} times as long", cost(n + 1));
    }

    /// The first step of a size may load kernels or weights: it says nothing of the next ones.
    #[test]
    fn first_steps_are_forgotten() {
        // An H200: a step of 64 takes 13 ms, a token of a prompt 33 us, and what runs for the first time half a second.
        let cost = |n: usize| if n <= 64 { 5.0 + 0.13 * n as f64 } else { 13.0 + 0.033 * n as f64 };
        for n_decoding in [1, 16, 64, 256] {
            let (mut pace, mut seen) = (Pace::new(TARGET), [false; N_SIZES]);
            let mut n = 0;
            for step in 0..200 {
                let company = if step < 20 { Company::Prompts } else { Company::Answers };
                let alongside = if step < 20 { 0 } else { n_decoding };
                n = pace.prompt_tokens(alongside, 2048 - alongside, company) + alongside;
                for size in [n, n_decoding] {
                    let first = !std::mem::replace(&mut seen[size_of(size)], true);
                    let ms = cost(size) + if first { 500.0 } else { 0.0 };
                    pace.observe(size, Duration::from_secs_f64(ms / 1e3));
                }
            }
            assert!(n >= 1448, "{n_decoding} decode: {n}");
        }
    }

    /// Seconds of an H200 for a step of N tokens: Qwen3-30B-A3B, as `bench` measures them.
    fn h200(n: usize) -> f64 {
        const MS: [(f64, f64); 9] = [
            (0.0, 1.0),
            (1.0, 1.35),
            (8.0, 4.0),
            (32.0, 9.0),
            (64.0, 12.0),
            (256.0, 17.3),
            (512.0, 20.0),
            (2048.0, 53.0),
            (8192.0, 228.0),
        ];
        let n = n as f64;
        let at = MS.iter().rposition(|&(from, _)| from <= n).unwrap_or(0).min(MS.len() - 2);
        let ((n0, t0), (n1, t1)) = (MS[at], MS[at + 1]);
        (t0 + (t1 - t0) * (n - n0) / (n1 - n0)) / 1e3
    }

    /// Clients that ask again as soon as they have their answer: tokens of answers a second, and the longest step in
    /// which answers ran.
    fn closed_loop(n_clients: usize, n_prompt: usize, n_answer: usize) -> (f64, f64) {
        let mut pace = Pace::new(Duration::from_millis(25));
        // Tokens of the prompt and of the answer that are left.
        let mut clients = vec![(n_prompt, n_answer); n_clients];
        let (mut time, mut tokens, mut longest) = (0.0, 0, 0.0f64);
        for step in 0..2000 {
            let is_counted = step >= 1000;
            let n_decoding = clients.iter().filter(|client| client.0 == 0).count();
            let has_prompts = n_decoding < n_clients;
            let company = if n_decoding > 0 { Company::Answers } else { Company::Prompts };
            let mut left = if has_prompts { pace.prompt_tokens(n_decoding, 8192 - n_decoding, company) } else { 0 };
            let mut n = n_decoding;
            for client in &mut clients {
                if client.0 == 0 {
                    client.1 -= 1;
                    tokens += usize::from(is_counted);
                    if client.1 == 0 {
                        *client = (n_prompt, n_answer);
                    }
                } else {
                    let given = left.min(client.0);
                    (client.0, left, n) = (client.0 - given, left - given, n + given);
                }
            }
            let seconds = h200(n);
            pace.observe(n, Duration::from_secs_f64(seconds));
            if is_counted {
                time += seconds;
                longest = longest.max(if n_decoding > 0 { seconds } else { 0.0 });
            }
        }
        (tokens as f64 / time, longest)
    }

    /// The more sequences decode, the longer steps may be: what two hundred clients get is near what the machine's
    /// speeds of prompts and of answers give together. Few have fluent answers.
    #[test]
    fn many_clients_share_the_wait() {
        for (n_clients, least, most) in [(32, 2500.0, 0.03), (64, 3500.0, 0.05), (256, 6500.0, 0.1)] {
            let (rate, longest) = closed_loop(n_clients, 512, 128);
            println!("{n_clients} clients: {rate:.0} tok/s, steps of {:.0} ms", 1e3 * longest);
            assert!(rate >= least && longest <= most, "{n_clients} clients: {rate} tok/s, {longest} s");
        }
    }

    /// Steps of a size with and without prompts differ: neither makes steps of other sizes look slow.
    #[test]
    fn kinds_of_steps_may_differ() {
        let mut pace = Pace::new(TARGET);
        let observe = |pace: &mut Pace, n, ms: f64| pace.observe(n, Duration::from_secs_f64(ms / 1e3));
        for n in [256, 256, 1024, 1024] {
            observe(&mut pace, n, 0.05 * n as f64);
        }
        let before = pace.prompt_tokens(256, 1792, Company::Answers);
        for i in 0..400 {
            observe(&mut pace, 300, if i % 2 == 0 { 10.0 } else { 30.0 });
        }
        let after = pace.prompt_tokens(256, 1792, Company::Answers);
        assert!(before >= 768 && 4 * after >= 3 * before, "{before}, {after}");
    }

    /// One step that was held up says little, and what is measured again forgets it.
    #[test]
    fn chance_is_forgotten() {
        let cost = |n: usize| 15.0 + 7.0 * n as f64;
        let mut pace = Pace::new(TARGET);
        let before = settled(&mut pace, 1, Company::Answers, cost);
        pace.observe(before + 1, Duration::from_secs(60));
        assert!(pace.prompt_tokens(1, 511, Company::Answers) >= before / 2);
        let after = settled(&mut pace, 1, Company::Answers, cost);
        assert!(after.abs_diff(before) <= 2, "{before}, {after}");
    }
}
