//! Every step against its plain definition, and the guarantees of the whole chain.

use proptest::prelude::*;

use super::*;

fn params() -> SamplerParams {
    SamplerParams { chain: DEFAULT_CHAIN.to_vec(), ..off() }
}

/// Returns all steps off, temperature 1.
fn off() -> SamplerParams {
    SamplerParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplerParams::default() }
}

/// Returns a row of `n` distinct logits in random order.
fn row(n: usize, spread: f32, seed: u64) -> Vec<f32> {
    let mut r = Pcg32::new(seed);
    (0..n).map(|_| (r.uniform() as f32 + r.uniform() as f32 - 1.0) * spread).collect()
}

/// (token, probability), best first.
fn softmax(logits: &[(u32, f64)]) -> Vec<(u32, f64)> {
    let sum: f64 = logits.iter().map(|l| l.1.exp()).sum();
    let mut p: Vec<_> = logits.iter().map(|l| (l.0, l.1.exp() / sum)).collect();
    p.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    p
}

proptest! {
    /// The best and the listed logits lead to the same choices and log-probabilities as the whole row, token after
    /// token.
    #[test]
    fn the_best_logits_choose_the_same_token(
        seed in any::<u64>(),
        greedy in any::<bool>(),
        top_k in 1usize..60,
        penalties in (prop::bool::ANY, 0.5f32..2.0, -1.0f32..2.0, -1.0f32..2.0, 1usize..80),
        dry in prop::bool::ANY,
        min_keep in 0usize..5,
        bias in prop::collection::vec((0u32..300, prop_oneof![Just(f32::NEG_INFINITY), -9f32..9.0]), 0..6),
        coarse in prop::bool::ANY,
        logprobs in prop::option::of(0usize..20),
    ) {
        let n_vocab = 300;
        let (penalises, penalty_repeat, penalty_frequency, penalty_presence, penalty_last_n) = penalties;
        let mut p = SamplerParams { seed, top_k, min_keep, logit_bias: bias, ..SamplerParams::default() };
        p.temperature = if greedy { 0.0 } else { 0.9 };
        (p.dry_multiplier, p.dry_last_n) = (if dry { 0.8 } else { 0.0 }, 40);
        if penalises {
            let q = SamplerParams { penalty_repeat, penalty_frequency, penalty_presence, penalty_last_n, ..p };
            p = q;
        }
        let (mut whole, mut best) = (Sampler::new(p.clone()).unwrap(), Sampler::new(p).unwrap());
        let mut n_best = 0;
        for step in 0..60 {
            let mut logits = row(n_vocab, 6.0, seed ^ step);
            if coarse {
                logits.iter_mut().for_each(|l| *l = (*l * 2.0).round() / 2.0); // ties
            }
            let wanted = whole.sample(&logits);
            let mut batch = backend::Batch::default();
            batch.push(&[0], 0, backend::Tables::default(), [0]);
            let Some(n) = best.needs(&[], logprobs, n_vocab, &mut batch.listed) else { continue };
            n_best += 1;
            batch.asks[0] = backend::Ask::Best {
                n: n as u32,
                first_listed: 0,
                n_listed: batch.listed.len() as u32,
                mask: None,
                log_sum_exp: logprobs.is_some(),
            };
            let mut picks = backend::Picks::default();
            picks.fill(&batch, &logits, n_vocab);
            let found = picks.get(0).unwrap();
            let token = best.sample_best(&found, &batch.listed, n_vocab);
            prop_assert_eq!(&token, &wanted);
            let Ok(token) = token else { break };
            if let Some(n) = logprobs {
                let (mut of_whole, mut of_best) = (Vec::new(), Vec::new());
                let a = whole.logprobs(&logits, token, n, &mut of_whole);
                let b = best.logprobs_best(&found, &batch.listed, token, n, &mut of_best);
                prop_assert_eq!((a, of_whole), (b, of_best));
            }
            whole.accept(token);
            best.accept(token);
        }
        prop_assert!(n_best > 0);
    }
}

/// Chains that need the whole distribution before they truncate it request whole rows.
#[test]
fn whole_rows_are_asked_for_where_they_matter() {
    let cases = [
        (SamplerParams::default(), Some(40)),
        (SamplerParams::greedy(), Some(1)),
        (SamplerParams { top_k: 0, ..SamplerParams::default() }, None),
        (SamplerParams { top_n_sigma: 1.0, ..SamplerParams::default() }, None),
        (SamplerParams { mirostat: Mirostat::V2, ..SamplerParams::default() }, None),
        (SamplerParams { top_k: 100_000, ..SamplerParams::default() }, None),
        (SamplerParams { logit_bias: vec![(7, 1.0), (3, 2.0), (7, 1.0)], ..SamplerParams::default() }, Some(42)),
    ];
    for (params, wanted) in cases {
        let mut listed = vec![9];
        let found = Sampler::new(params.clone()).unwrap().needs(&[], None, 200_000, &mut listed);
        assert_eq!(found, wanted, "{params:?}");
        assert_eq!(listed, if wanted == Some(42) { vec![9, 3, 7] } else { vec![9] });
    }
}

type Row = Vec<(u32, f64)>;

/// Runs one step and compares the remaining candidates, with logits up to a constant, with the definition.
fn compare(name: &str, p: &SamplerParams, stage: Stage, history: &[u32], naive: impl Fn(&Row) -> Row) {
    for (n, spread) in [(1, 1.0), (2, 3.0), (50, 4.0), (50, 0.0), (3000, 6.0)] {
        let logits = row(n, spread, n as u64);
        let mut sampler = Sampler::new(SamplerParams { chain: vec![stage], ..p.clone() }).unwrap();
        history.iter().for_each(|t| sampler.accept(*t));
        sampler.sample(&logits).unwrap();
        let mut got: Row = sampler.candidates.iter().map(|c| (c.id, c.logit)).collect();
        let mut want = naive(&logits.iter().enumerate().map(|(i, l)| (i as u32, f64::from(*l))).collect());
        got.sort_by_key(|c| c.0);
        want.sort_by_key(|c| c.0);
        let ids = |r: &Row| r.iter().map(|c| c.0).collect::<Vec<_>>();
        assert_eq!(ids(&got), ids(&want), "{name}, {n} tokens");
        let shift = got[0].1 - want[0].1;
        for (g, w) in got.iter().zip(&want) {
            assert!((g.1 - w.1 - shift).abs() < 1e-9, "{name}, {n} tokens: {g:?} {w:?}");
        }
    }
}

/// Returns the entries of `row` whose tokens are in `keep`.
fn only(row: &Row, keep: &[u32]) -> Row {
    row.iter().filter(|c| keep.contains(&c.0)).copied().collect()
}

/// Returns the head of `ranked` up to where the running sum satisfies `enough`.
fn head(ranked: &[(u32, f64)], enough: impl Fn(f64) -> bool) -> Vec<u32> {
    let mut sum = 0.0;
    let mut ids = Vec::new();
    for (id, p) in ranked {
        sum += p;
        ids.push(*id);
        if enough(sum) {
            break;
        }
    }
    ids
}

#[test]
fn steps_do_what_their_definitions_say() {
    for k in [1, 3, 40, 5000] {
        let p = SamplerParams { top_k: k, ..off() };
        compare("top_k", &p, Stage::TopK, &[], |r| {
            only(r, &softmax(r).iter().take(k).map(|c| c.0).collect::<Vec<_>>())
        });
    }
    for top_p in [0.0f32, 0.3, 0.9, 0.999] {
        let p = SamplerParams { top_p, ..off() };
        compare("top_p", &p, Stage::TopP, &[], |r| only(r, &head(&softmax(r), |s| s >= f64::from(top_p))));
    }
    for min_p in [0.01f32, 0.2, 0.999] {
        let p = SamplerParams { min_p, ..off() };
        compare("min_p", &p, Stage::MinP, &[], |r| {
            let all = softmax(r);
            let keep: Vec<_> = all.iter().filter(|c| c.1 / all[0].1 >= f64::from(min_p) - 1e-12).map(|c| c.0).collect();
            only(r, &keep)
        });
    }
    for typical_p in [0.2f32, 0.9] {
        let p = SamplerParams { typical_p, ..off() };
        compare("typical", &p, Stage::Typical, &[], |r| {
            let all = softmax(r);
            let entropy: f64 = all.iter().map(|c| -c.1 * c.1.ln()).sum();
            let mut by: Vec<_> = all.iter().map(|c| (c.0, c.1, (-c.1.ln() - entropy).abs())).collect();
            by.sort_by(|a, b| {
                let tie = (a.2 - b.2).abs() < 1e-12;
                if tie { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) } else { a.2.total_cmp(&b.2) }
            });
            let ranked: Vec<_> = by.iter().map(|c| (c.0, c.1)).collect();
            only(r, &head(&ranked, |s| s > f64::from(typical_p)))
        });
    }
    for n in [0.5f32, 1.0, 2.0] {
        let p = SamplerParams { top_n_sigma: n, ..off() };
        compare("top_n_sigma", &p, Stage::TopNSigma, &[], |r| {
            let len = r.len() as f64;
            let mean = r.iter().map(|c| c.1).sum::<f64>() / len;
            let sigma = (r.iter().map(|c| (c.1 - mean).powi(2)).sum::<f64>() / len).sqrt();
            let max = r.iter().map(|c| c.1).fold(f64::MIN, f64::max);
            r.iter().filter(|c| c.1 >= max - f64::from(n) * sigma).copied().collect()
        });
    }
    for threshold in [0.01f32, 0.1, 0.5] {
        let p = SamplerParams { xtc_probability: 1.0, xtc_threshold: threshold, ..off() };
        compare("xtc", &p, Stage::Xtc, &[], |r| {
            let all = softmax(r);
            let likely = all.iter().filter(|c| c.1 >= f64::from(threshold)).count();
            let drop: Vec<_> = all.iter().take(likely.saturating_sub(1)).map(|c| c.0).collect();
            r.iter().filter(|c| !drop.contains(&c.0)).copied().collect()
        });
    }
    for (t, range, exponent) in [(0.5f32, 0.0f32, 1.0f32), (2.0, 0.0, 1.0), (1.0, 0.5, 1.0), (0.8, 0.7, 2.0)] {
        let p = SamplerParams { temperature: t, dynatemp_range: range, dynatemp_exponent: exponent, ..off() };
        compare("temperature", &p, Stage::Temperature, &[], |r| {
            let mut by = f64::from(t);
            if range > 0.0 && r.len() > 1 {
                let entropy: f64 = softmax(r).iter().map(|c| -c.1 * c.1.ln()).sum();
                let low = (by - f64::from(range)).max(0.0);
                let share = entropy / (r.len() as f64).ln();
                by = low + (by + f64::from(range) - low) * share.min(1.0).powf(f64::from(exponent));
            }
            r.iter().map(|c| (c.0, c.1 / by)).collect()
        });
    }
    let history = [9, 9, 1, 0, 0, 1, 9, 1];
    let p = SamplerParams {
        penalty_last_n: 6,
        penalty_repeat: 1.3,
        penalty_frequency: 0.2,
        penalty_presence: 0.4,
        ..off()
    };
    compare("penalties", &p, Stage::Penalties, &history, |r| {
        let change = |(id, l): (u32, f64)| {
            let n = history[2..].iter().filter(|t| **t == id).count() as f64;
            let repeat = f64::from(1.3f32);
            let scaled = if l <= 0.0 { l * repeat } else { l / repeat };
            if n > 0.0 { (id, scaled - n * f64::from(0.2f32) - f64::from(0.4f32)) } else { (id, l) }
        };
        r.iter().map(|c| change(*c)).collect()
    });
}

/// Returns the longest repetition that each token would extend, by trying every position of the window.
fn naive_dry(window: &[u32], breakers: &[Vec<u32>], allowed: usize) -> Vec<(u32, usize)> {
    let n = window.len();
    let limit = (0..n)
        .rev()
        .find_map(|at| {
            breakers.iter().filter(|b| window[at..].starts_with(b)).map(Vec::len).max().map(|len| n - at - len)
        })
        .unwrap_or(n);
    let mut found: Vec<(u32, usize)> = Vec::new();
    for end in 1..n {
        let len = (0..end).take_while(|i| window[end - 1 - i] == window[n - 1 - i]).count().min(limit);
        let token = window[end];
        if n <= allowed || limit < allowed || len < allowed || breakers.contains(&vec![token]) {
            continue;
        }
        match found.iter_mut().find(|f| f.0 == token) {
            Some(f) => f.1 = f.1.max(len),
            None => found.push((token, len)),
        }
    }
    found
}

#[test]
fn dry_penalises_by_the_length_of_the_repetition() {
    let mut r = Pcg32::new(5);
    for round in 0..300 {
        let history: Vec<u32> = (0..round % 40).map(|_| (r.uniform() * 4.0) as u32).collect();
        let breakers = [vec![], vec![vec![3]], vec![vec![3, 2], vec![1, 1, 0]]][round % 3].clone();
        let p = SamplerParams {
            dry_multiplier: 0.8,
            dry_base: 1.75,
            dry_allowed_length: 1 + round % 3,
            dry_last_n: 30,
            dry_breakers: breakers.clone(),
            ..off()
        };
        let window = &history[history.len().saturating_sub(30)..];
        let list = naive_dry(window, &breakers, p.dry_allowed_length);
        compare("dry", &p, Stage::Dry, &history, |r| {
            let penalty = |id: u32| match list.iter().find(|f| f.0 == id) {
                Some(f) => f64::from(0.8f32) * 1.75f64.powi((f.1 - p.dry_allowed_length) as i32),
                None => 0.0,
            };
            r.iter().map(|c| (c.0, c.1 - penalty(c.0))).collect()
        });
    }
}

#[test]
fn parameters_are_refused_by_name() {
    type Set = fn(&mut SamplerParams, f32);
    let table: &[(&str, Set, &[f32])] = &[
        ("temperature", |p, v| p.temperature = v, &[f32::NAN, f32::INFINITY]),
        ("dynatemp_range", |p, v| p.dynatemp_range = v, &[f32::NAN, -1.0]),
        ("dynatemp_exponent", |p, v| p.dynatemp_exponent = v, &[f32::NAN, -1.0]),
        ("top_p", |p, v| p.top_p = v, &[f32::NAN, -0.1, 1.1]),
        ("min_p", |p, v| p.min_p = v, &[f32::NAN, -0.1, 1.1]),
        ("typical_p", |p, v| p.typical_p = v, &[f32::NAN, -0.1, 1.1]),
        ("top_n_sigma", |p, v| p.top_n_sigma = v, &[f32::NAN, f32::INFINITY]),
        ("xtc_probability", |p, v| p.xtc_probability = v, &[f32::NAN, -0.1, 1.1]),
        ("xtc_threshold", |p, v| p.xtc_threshold = v, &[f32::NAN, -0.1, 1.1]),
        ("repeat_penalty", |p, v| p.penalty_repeat = v, &[f32::NAN, 0.0, -1.0, f32::INFINITY]),
        ("frequency_penalty", |p, v| p.penalty_frequency = v, &[f32::NAN]),
        ("presence_penalty", |p, v| p.penalty_presence = v, &[f32::NAN]),
        ("dry_multiplier", |p, v| p.dry_multiplier = v, &[f32::NAN, -1.0]),
        ("dry_base", |p, v| p.dry_base = v, &[f32::NAN, -1.0]),
        ("mirostat_tau", |p, v| p.mirostat_tau = v, &[f32::NAN, -1.0]),
        ("mirostat_eta", |p, v| p.mirostat_eta = v, &[f32::NAN, -1.0, 2.0]),
        ("logit bias", |p, v| p.logit_bias = vec![(1, v)], &[f32::NAN, f32::INFINITY]),
    ];
    for (name, set, values) in table {
        for value in *values {
            let mut p = SamplerParams::default();
            set(&mut p, *value);
            let error = Sampler::new(p).unwrap_err().to_string();
            assert!(error.contains(name), "{name} = {value}: {error}");
        }
    }
}

#[test]
fn bad_rows_are_errors() {
    let inf = f32::INFINITY;
    for p in [SamplerParams::greedy(), SamplerParams::default(), params()] {
        let mut s = Sampler::new(p).unwrap();
        assert!(matches!(s.sample(&[0.0, f32::NAN, 1.0]), Err(Error::Logit { token: 1, .. })));
        assert_eq!(s.sample(&[0.0, 1.0, inf]), Err(Error::Logit { token: 2, value: inf }));
        assert_eq!(s.sample(&[-inf, -inf]), Err(Error::Nothing { n_vocab: 2 }));
        assert_eq!(s.sample(&[]), Err(Error::Nothing { n_vocab: 0 }));
        assert_eq!(s.sample(&[-inf, 0.0]), Ok(1));
    }
    let bias = vec![(0, -inf), (1, -inf), (7, 1.0)];
    let mut s = Sampler::new(SamplerParams { logit_bias: bias, ..SamplerParams::default() }).unwrap();
    assert_eq!(s.sample(&[1.0, 2.0]), Err(Error::Nothing { n_vocab: 2 }));
}

#[test]
fn the_best_is_found_wherever_it_stands() {
    let mut s = Sampler::new(SamplerParams::greedy()).unwrap();
    for n in [1, 15, 16, 17, 1023, 1024, 1025, 5000] {
        for at in [0, 1, n / 3, n / 2, n - 1] {
            let mut row: Vec<f32> = (0..n).map(|i| -((i * 7 % 31) as f32) - 1.0).collect();
            row[at % n] = 0.0;
            assert_eq!(s.sample(&row), Ok((at % n) as u32), "{n}");
            row[n - 1] = 0.0;
            assert_eq!(s.sample(&row), Ok((at % n) as u32), "{n}, a tie");
            row[at % n] = f32::NAN;
            assert!(matches!(s.sample(&row), Err(Error::Logit { token, .. }) if token as usize == at % n), "{n}");
        }
    }
}

#[test]
fn greedy_takes_the_best_and_the_lower_id_at_a_tie() {
    let mut s = Sampler::new(SamplerParams::greedy()).unwrap();
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
    let p = SamplerParams { penalty_repeat: 2.0, ..SamplerParams::greedy() };
    let mut s = Sampler::new(p).unwrap();
    s.accept(1);
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 2);
    let p = SamplerParams { logit_bias: vec![(3, 5.0)], ..SamplerParams::greedy() };
    assert_eq!(Sampler::new(p).unwrap().sample(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 3);
}

/// The numbers of PCG32's reference algorithm for seed 42 on its default stream, computed by a separate Python program.
#[test]
fn random_numbers_are_those_of_pcg32() {
    let mut r = Pcg32::new(42);
    assert_eq!([(); 6].map(|()| r.next()), [0xc2f57bd6, 0x6b07c4a9, 0x72b7b29b, 0x44215383, 0xf5af5ead, 0x68beb632]);
    let mut r = Pcg32::new(42);
    assert_eq!(r.uniform(), ((0xc2f57bd6u64 >> 5 << 26) | (0x6b07c4a9 >> 6)) as f64 / 9_007_199_254_740_992.0);
}

#[test]
fn seeds_reproduce() {
    let tokens = |seed| -> Vec<u32> {
        let mut s = Sampler::new(SamplerParams { seed, ..SamplerParams::default() }).unwrap();
        (0..200).map(|i| s.sample(&row(500, 8.0, i)).unwrap()).collect()
    };
    assert_eq!(tokens(7), tokens(7));
    assert_ne!(tokens(7), tokens(8));
}

#[test]
fn logprobs_are_of_the_unmodified_row() {
    let logits = row(5000, 10.0, 3);
    let all = softmax(&logits.iter().enumerate().map(|(i, l)| (i as u32, f64::from(*l))).collect::<Vec<_>>());
    let mut s = Sampler::new(SamplerParams { logit_bias: vec![(all[0].0, -100.0)], ..params() }).unwrap();
    let mut out = vec![(0, 0.0)];
    let one = s.sample(&logits).unwrap();
    let logprob = s.logprobs(&logits, one, 20, &mut out).unwrap();
    assert_eq!(out.len(), 21);
    for (got, want) in out[1..].iter().zip(&all) {
        assert_eq!(got.0, want.0);
        assert!((f64::from(got.1) - want.1.ln()).abs() < 1e-5, "{got:?} {want:?}");
    }
    let want = all.iter().find(|c| c.0 == one).unwrap().1.ln();
    assert!((f64::from(logprob) - want).abs() < 1e-5);
    s.logprobs(&logits, one, 100_000, &mut out).unwrap();
    assert_eq!(out.len(), 21 + 5000);
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -f32::INFINITY, -2.0];
    let p = softmax(&logits.iter().enumerate().map(|(i, l)| (i as u32, f64::from(*l))).collect::<Vec<_>>());
    let mut s = Sampler::new(SamplerParams { seed: 11, ..params() }).unwrap();
    let n = 40_000;
    let mut counts = [0.0f64; 8];
    for _ in 0..n {
        counts[s.sample(&logits).unwrap() as usize] += 1.0;
    }
    assert_eq!(counts[6], 0.0);
    let chi: f64 = p
        .iter()
        .filter(|c| c.1 > 0.0)
        .map(|c| (c.0, c.1 * f64::from(n)))
        .map(|(i, e)| (counts[i as usize] - e).powi(2) / e)
        .sum();
    // 6 degrees of freedom: 22.5 is exceeded once in a thousand seeds, and the seed is fixed.
    assert!(chi < 22.5, "{chi}");
}

#[test]
fn mirostat_holds_its_target() {
    // A Zipf row with exponent 1.2, as the method assumes.
    let logits: Vec<f32> = (0..5000).map(|i| -1.2 * ((i + 1) as f32).ln()).collect();
    for mirostat in [Mirostat::V1, Mirostat::V2] {
        for tau in [2.0f32, 4.0] {
            let p = SamplerParams { mirostat, mirostat_tau: tau, seed: 3, ..params() };
            let mut s = Sampler::new(p).unwrap();
            let (mut sum, mut n) = (0.0, 0.0);
            for step in 0..3000 {
                let token = s.sample(&logits).unwrap();
                if step < 500 {
                    continue;
                }
                // Surprise among the candidates left when the token was drawn.
                let left: Row = s.candidates.iter().map(|c| (c.id, c.logit)).collect();
                let p = softmax(&left).iter().find(|c| c.0 == token).unwrap().1;
                sum -= p.log2();
                n += 1.0;
            }
            assert!((sum / n - f64::from(tau)).abs() < 0.1, "{mirostat:?}, target {tau}: {}", sum / n);
        }
    }
}

#[test]
fn history_keeps_the_window_and_no_more() {
    let p = SamplerParams { penalty_last_n: 8, penalty_presence: 1.0, ..params() };
    let mut s = Sampler::new(p).unwrap();
    for t in 0..1000u32 {
        s.accept(t);
        assert!(s.history.len() <= 16);
        let want: Vec<u32> = ((t + 1).saturating_sub(8)..=t).collect();
        assert_eq!(s.history[s.history.len() - want.len()..], want);
    }
}

fn any_params() -> impl Strategy<Value = SamplerParams> {
    let unit = || prop_oneof![Just(0.0f32), Just(1.0), 0.0f32..=1.0];
    let a = (any::<u64>(), -1.0f32..3.0, 0.0f32..2.0, 0.0f32..3.0, 0usize..50, unit(), unit(), unit());
    let b = (-1.0f32..3.0, unit(), unit(), 0usize..5, 0usize..20, 0.1f32..3.0, -2.0f32..2.0, -2.0f32..2.0);
    let c = (
        0.0f32..3.0,
        0.5f32..3.0,
        0usize..4,
        0usize..20,
        0u8..5,
        0.0f32..8.0,
        Just(DEFAULT_CHAIN.to_vec()).prop_shuffle(),
    );
    (a, b, c).prop_map(|(a, b, c)| SamplerParams {
        seed: a.0,
        temperature: a.1,
        dynatemp_range: a.2,
        dynatemp_exponent: a.3,
        top_k: a.4,
        top_p: a.5,
        min_p: a.6,
        typical_p: a.7,
        top_n_sigma: b.0,
        xtc_probability: b.1,
        xtc_threshold: b.2,
        min_keep: b.3,
        penalty_last_n: b.4,
        penalty_repeat: b.5,
        penalty_frequency: b.6,
        penalty_presence: b.7,
        dry_multiplier: c.0,
        dry_base: c.1,
        dry_allowed_length: c.2,
        dry_last_n: c.3,
        dry_breakers: vec![vec![1], vec![2, 3]],
        mirostat: [Mirostat::Off, Mirostat::Off, Mirostat::Off, Mirostat::V1, Mirostat::V2][c.4 as usize],
        mirostat_tau: c.5,
        chain: c.6,
        logit_bias: vec![(2, f32::NEG_INFINITY), (0, 1.0)],
        ..SamplerParams::default()
    })
}

proptest! {
    #[test]
    fn no_row_and_no_parameters_panic(
        p in any_params(),
        logits in prop::collection::vec(prop_oneof![8 => -9.0f32..9.0, 2 => any::<f32>(), 1 => Just(f32::NEG_INFINITY)], 0..40),
    ) {
        let mut s = Sampler::new(p).unwrap();
        for _ in 0..8 {
            match s.sample(&logits) {
                Ok(token) => {
                    prop_assert!(token != 2 && logits[token as usize] > f32::NEG_INFINITY);
                    let logprob = s.logprobs(&logits, token, 0, &mut Vec::new()).unwrap();
                    prop_assert!(logprob <= 1e-3 && !logprob.is_nan());
                    s.accept(token);
                }
                Err(_) => {
                    let bad = logits.iter().any(|l| l.is_nan() || *l == f32::INFINITY);
                    let none = logits.iter().enumerate().all(|(i, l)| i == 2 || *l == f32::NEG_INFINITY);
                    prop_assert!(bad || none);
                }
            }
        }
    }

    #[test]
    fn top_k_of_one_is_greedy(mut p in any_params(), logits in prop::collection::vec(-9.0f32..9.0, 3..40)) {
        p.chain = vec![Stage::TopK, Stage::Typical, Stage::TopP, Stage::MinP, Stage::Xtc, Stage::Temperature];
        p.logit_bias.clear();
        (p.top_k, p.min_keep, p.mirostat) = (1, 0, Mirostat::Off);
        let want = Sampler::new(SamplerParams::greedy()).unwrap().sample(&logits);
        prop_assert_eq!(Sampler::new(p).unwrap().sample(&logits), want);
    }
}

/// What is asked of a row behind drafts is what would be asked if they were accepted.
#[test]
fn drafts_are_listed_as_if_accepted() {
    for (penalty_last_n, dry_last_n) in [(1, 0), (3, 2), (5, 40), (64, 7)] {
        let p = SamplerParams { penalty_repeat: 1.3, penalty_last_n, dry_multiplier: 0.5, dry_last_n, ..params() };
        let mut now = Sampler::new(SamplerParams { top_k: 9, ..p }).unwrap();
        (0..12).for_each(|i| now.accept(i * 7 % 30));
        let drafts = [40, 3, 41, 40, 42, 5, 43];
        let mut later = now.clone();
        for n in 0..=drafts.len() {
            let (mut found, mut wanted) = (vec![99], vec![99]);
            let asked = now.needs(&drafts[..n], None, 1000, &mut found);
            assert_eq!(asked, later.needs(&[], None, 1000, &mut wanted), "{n} drafts");
            assert_eq!(found, wanted, "{n} drafts, {penalty_last_n} and {dry_last_n} tokens");
            drafts[n..].iter().take(1).for_each(|&token| later.accept(token));
        }
    }
}
