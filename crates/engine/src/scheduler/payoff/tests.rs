//! Simulated machines, drafters and texts: the loss is bounded whatever they do, and gains are taken.

use super::*;

/// A deterministic source of numbers in 0..1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        // SplitMix64 (Steele, Lea, Flood, 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / u64::MAX as f64
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() * n as f64) as usize).min(n - 1)
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + self.next() * (high - low)
    }
}

/// What steps cost, in plain steps of the same sequences.
struct Machine {
    /// Seconds of a plain step.
    plain: f64,
    /// By number of drafts, times the number of sequences.
    steps: [f64; MAX_ROWS + 1],
    head: f64,
    lookup: f64,
    /// Spread of each time.
    noise: f64,
    /// How much slower the machine is in every other thousand steps.
    slower: f64,
}

impl Machine {
    /// Steps never get cheaper with drafts, and a draft costs no more than a token.
    fn random(numbers: &mut Numbers, noise: f64) -> Machine {
        let (kind, slope) = (numbers.below(4), numbers.next());
        let mut steps = [1.0; MAX_ROWS + 1];
        for i in 1..=MAX_ROWS {
            let each = match kind {
                0 => slope,
                1 => slope * 0.7f64.powi(i as i32),
                2 => f64::from(u8::from(numbers.next() < slope)),
                _ => numbers.next(),
            };
            steps[i] = steps[i - 1] + each;
        }
        let head = if numbers.next() < 0.5 { 0.0 } else { numbers.between(0.01, 0.9) };
        let lookup = if head > 0.0 { 0.0 } else { numbers.between(0.0, 0.01) };
        Machine { plain: 10f64.powf(numbers.between(-4.0, 0.0)), steps, head, lookup, noise, slower: 1.0 }
    }

    fn with(steps: &[f64], head: f64) -> Machine {
        let last = steps[steps.len() - 1];
        let of = |i: usize| steps.get(i).map_or_else(|| last + (i + 1 - steps.len()) as f64, |&step| step);
        Machine { plain: 0.01, steps: std::array::from_fn(of), head, lookup: 0.0, noise: 0.0, slower: 1.0 }
    }

    /// Relative time of a step of `n` sequences.
    fn step(&self, n: usize, n_drafts: usize) -> f64 {
        1.0 + (self.steps[n_drafts] - 1.0) / n as f64
    }
}

/// How drafts of a sequence turn out.
#[derive(Clone, Copy)]
enum Text {
    /// Right with this probability.
    Odds(f64),
    /// Right with one or the other, each for a number of tokens.
    Flips(f64, f64, usize),
    /// Right as long as few are drafted, or for a number of steps; then wrong until none are.
    Malicious(usize),
    /// A guess is there with a probability, and right with another.
    Seldom(f64, f64),
}

impl Text {
    fn random(numbers: &mut Numbers) -> Text {
        match numbers.below(5) {
            0 => Text::Odds(numbers.next()),
            1 | 2 => Text::Flips(numbers.between(0.7, 1.0), numbers.between(0.0, 0.3), 1 + numbers.below(400)),
            3 => Text::Malicious(numbers.below(30)),
            _ => Text::Seldom(numbers.next(), numbers.next()),
        }
    }
}

/// What a sequence went through: of each step its tokens, its time, and the time of a plain step.
type History = Vec<(usize, f64, f64)>;

/// Runs `n` sequences for `n_steps`; every so often one ends and another takes its place.
fn simulate(machine: &Machine, texts: &[Text], n_steps: usize, every: usize, numbers: &mut Numbers) -> Vec<History> {
    let (n, mut payoff) = (texts.len(), Payoff::new());
    let mut accounts = vec![Account::default(); n];
    let mut histories = vec![History::new(); n];
    let mut streaks = vec![0; n];
    for i in 0..n_steps {
        if every > 0 && i % every == every - 1 {
            accounts[i / every % n] = payoff.open();
        }
        let n_tokens = |h: &History| h.iter().map(|step| step.0).sum::<usize>();
        let mut candidates: Vec<Candidate> = accounts.iter().map(|&a| Candidate::new(a, MAX_DRAFT)).collect();
        payoff.choose(&mut candidates, MAX_ROWS, machine.head > 0.0);
        let now = if i / 1000 % 2 == 1 { machine.slower } else { 1.0 };
        let mut drafting = 0.0;
        if machine.head == 0.0 {
            for (candidate, text) in candidates.iter_mut().zip(texts) {
                drafting += if candidate.n > 0 { now * machine.lookup } else { 0.0 };
                let has_guess = !matches!(text, Text::Seldom(share, _) if numbers.next() > *share);
                candidate.max = if candidate.n > 0 && has_guess { MAX_DRAFT } else { 0 };
            }
            payoff.choose(&mut candidates, MAX_ROWS, false);
        }
        let depth = candidates.iter().map(|candidate| candidate.n).max().unwrap_or(0);
        let n_drafts = candidates.iter().map(|candidate| candidate.n).sum();
        if machine.head > 0.0 && depth > 0 {
            drafting = now * machine.head * depth as f64;
            payoff.observe_head(depth, drafting * machine.plain);
        }
        let noise = if machine.noise > 0.0 { machine.noise.powf(numbers.between(-1.0, 1.0)) } else { 1.0 };
        let time = now * machine.step(n, n_drafts) * noise;
        let bill = payoff.observe(n, n_drafts, time * machine.plain, drafting * machine.plain);
        for (s, text) in texts.iter().enumerate() {
            let k = candidates[s].n;
            let mut n_accepted = 0;
            streaks[s] = if k > 0 { streaks[s] + 1 } else { 0 };
            let is_right = |numbers: &mut Numbers| match *text {
                Text::Odds(p) | Text::Seldom(_, p) => numbers.next() < p,
                Text::Flips(a, b, each) => numbers.next() < if n_tokens(&histories[s]) / each % 2 == 0 { a } else { b },
                Text::Malicious(patience) => k == 1 || streaks[s] <= patience,
            };
            while n_accepted < k && is_right(numbers) {
                n_accepted += 1;
            }
            payoff.charge(&mut accounts[s], bill, k, n_accepted);
            histories[s].push((1 + n_accepted, time + drafting, if n_drafts == 0 { time } else { now }));
        }
    }
    histories
}

/// The largest loss of any steps in a row that have at most 200 tokens, and one more step, in plain steps.
fn worst(history: &History) -> f64 {
    let mut worst = 0f64;
    for start in 0..history.len() {
        let (mut tokens, mut loss) = (0, 0.0);
        for &(n, time, plain) in &history[start..] {
            tokens += n;
            loss += time - n as f64 * plain;
            worst = worst.max(loss);
            if tokens >= 200 {
                break;
            }
        }
    }
    worst
}

fn speed(history: &History) -> f64 {
    let [tokens, time] = history.iter().fold([0.0; 2], |[a, b], &(n, time, _)| [a + n as f64, b + time]);
    tokens / time
}

/// 2% of 200 tokens, whatever the machine, the drafts and the texts do.
#[test]
fn no_200_tokens_take_2_percent_longer() {
    for seed in 0..4000 {
        let mut numbers = Numbers(seed);
        let machine = Machine::random(&mut numbers, 0.0);
        let n = [1, 1, 1, 2, 3, 4, 8][numbers.below(7)];
        let texts: Vec<Text> = (0..n).map(|_| Text::random(&mut numbers)).collect();
        // Answers one after the other are one text.
        let every = if n == 1 { [0, 7, 40, 300][numbers.below(4)] } else { 0 };
        for history in simulate(&machine, &texts, 700, every, &mut numbers) {
            let loss = worst(&history);
            assert!(loss <= 4.0, "seed {seed}: {loss} plain steps are lost over 200 tokens");
        }
    }
}

/// Times that vary by a fifth either way, on a machine that is at times three times slower, are measured well enough.
#[test]
fn noise_costs_little() {
    for seed in 0..400 {
        let mut numbers = Numbers(seed);
        let machine = Machine { slower: [1.0, 3.0][numbers.below(2)], ..Machine::random(&mut numbers, 1.2) };
        let texts = [Text::random(&mut numbers)];
        for history in simulate(&machine, &texts, 3000, 0, &mut numbers) {
            let [taken, plain] =
                history.iter().fold([0.0; 2], |[a, b], &(n, time, plain)| [a + time, b + n as f64 * plain]);
            assert!(taken <= 1.03 * plain, "seed {seed}: {taken} for {plain}");
        }
    }
}

/// The number of drafts that would be best is found, and used nearly all the time.
#[test]
fn gains_are_taken() {
    let cases: &[(&str, &[f64], f64, f64)] = &[
        ("a step costs the same with drafts", &[1.0, 1.02, 1.04, 1.06, 1.08], 0.0, 0.8),
        ("a head", &[1.0, 1.1, 1.2, 1.3, 1.4], 0.05, 0.75),
        ("one draft pays", &[1.0, 1.2, 2.0, 3.0, 4.0], 0.05, 0.9),
        ("experts of every token are others", &[1.0, 1.6, 2.1, 2.5, 2.8], 0.0, 0.95),
        ("a second row is dear, further ones are not", &[1.0, 1.9, 1.95, 2.0, 2.05], 0.0, 0.9),
        ("nothing pays", &[1.0, 1.9, 2.8, 3.7, 4.6], 0.0, 0.5),
    ];
    for &(name, steps, head, odds) in cases {
        let machine = Machine::with(steps, head);
        let mut numbers = Numbers(3);
        let history = &simulate(&machine, &[Text::Odds(odds)], 4000, 0, &mut numbers)[0];
        let expected = (0..=MAX_DRAFT)
            .map(|k| (0..=k as i32).map(|i| odds.powi(i)).sum::<f64>() / (machine.steps[k] + head * k as f64))
            .fold(0.0, f64::max);
        let share = speed(history) / expected;
        assert!(share > 0.85, "{name}: {share} of {expected}");
    }
}

/// Drafts come back where a text becomes predictable, within some 200 tokens.
#[test]
fn drafts_come_back() {
    let machine = Machine::with(&[1.0, 1.3, 1.5, 1.7, 1.9], 0.0);
    let history = &simulate(&machine, &[Text::Flips(1.0, 0.0, 1000)], 3000, 0, &mut Numbers(1))[0];
    let mut at = 0;
    let in_turn: Vec<usize> = history
        .iter()
        .map(|&(n, ..)| {
            at += n;
            if (2000 < at && at < 2200) || n == 1 { 0 } else { at / 1000 }
        })
        .collect();
    let n_long = |phase: usize| in_turn.iter().filter(|&&p| p == phase).count();
    assert!(n_long(2) > 100, "{} steps with drafts in 800 predictable tokens", n_long(2));
}

/// A sequence whose drafts are wrong is not slowed by one whose drafts are right.
#[test]
fn company_pays_for_itself() {
    let machine = Machine::with(&[1.0, 1.8, 2.6, 3.4, 4.2], 0.0);
    let histories = simulate(&machine, &[Text::Odds(1.0), Text::Odds(0.0)], 2000, 0, &mut Numbers(1));
    assert!(speed(&histories[1]) > 0.98, "{}", speed(&histories[1]));
    let free = Machine::with(&[1.0; 9], 0.0);
    let histories = simulate(&free, &[Text::Odds(1.0), Text::Odds(0.0)], 2000, 0, &mut Numbers(1));
    assert!(speed(&histories[0]) > 4.0 && speed(&histories[1]) > 0.98);
}

/// A step that was held up at the wrong moment ends drafts for a while, and not for good.
#[test]
fn chance_is_forgotten() {
    for n_held_up in 1..4 {
        let (mut payoff, mut account, mut n) = (Payoff::new(), Account::default(), 0);
        let mut at = None;
        for i in 0..3000 {
            let mut candidates = [Candidate::new(account, MAX_DRAFT)];
            payoff.choose(&mut candidates, MAX_ROWS, false);
            let k = candidates[0].n;
            n += usize::from(k > 0);
            let time = if k > 0 && n <= n_held_up { 0.5 } else { 0.01 + 0.001 * k as f64 };
            let bill = payoff.observe(1, k, time, 0.0);
            payoff.charge(&mut account, bill, k, k);
            if n == n_held_up + 20 && at.is_none() {
                at = Some(i);
            }
        }
        assert!(at.is_some_and(|at| at < 2000) && n > 1000, "{n_held_up} held up: {at:?}, {n} with drafts");
    }
}

/// Drafts that a grammar forces pay whatever guesses were like, as long as the account covers them, and say nothing of
/// guesses.
#[test]
fn forced_drafts_need_no_odds() {
    let (mut payoff, mut account) = (Payoff::new(), Account::default());
    for n in [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0] {
        payoff.observe(1, n, 0.01 * (1.0 + 0.2 * n as f64), 0.0);
    }
    (0..100).for_each(|_| account.judge(4, 0, NEWEST_DRAFT));
    let chosen = |account: Account, n_sure: usize| {
        let max = if n_sure == 0 { 4 } else { n_sure };
        let mut candidates = [Candidate { n_sure, ..Candidate::new(Account { credit: 2.0, ..account }, max) }];
        payoff.choose(&mut candidates, MAX_ROWS, false);
        candidates[0].n
    };
    assert_eq!([0, 1, 2, 4].map(|n_sure| chosen(account, n_sure)), [0, 1, 2, 4]);
    // An account that covers no loss gets none.
    let mut candidates = [Candidate { n_sure: 4, ..Candidate::new(Account { credit: 0.0, ..account }, 4) }];
    payoff.choose(&mut candidates, MAX_ROWS, false);
    assert_eq!(candidates[0].n, 0);
    let odds = account.odds;
    payoff.charge(&mut account, 1.5, 0, 4);
    assert_eq!(account.odds, odds);
}
