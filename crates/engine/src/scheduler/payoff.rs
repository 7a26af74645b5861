//! How many drafts a step pays for: what steps with drafts cost, how often drafts are right, and what may be lost.
//!
//! Knows no clock, no texts and no devices: times and results are numbers that the engine measures. They decide when
//! tokens are computed, and never which.
//!
//! A step of `n` sequences with `e` drafts gives `n` tokens and those drafts that are right. The number is chosen that
//! gives the most tokens per second, by the measured time of such steps and the measured odds of each sequence. Both
//! may change at any time, so each sequence has an account as well: a step's loss against a plain one is taken from it,
//! what a step saves is added, up to [`CREDIT`], and so is [`REGAIN`] with each token. Drafts are computed where the
//! account of every sequence of the step covers the loss that there is if all of them are wrong. So no answer loses
//! more than `CREDIT + 200 REGAIN`, less than 4 plain steps, over any 200 of its tokens, whatever the drafts are.

/// Largest number of drafts of a sequence in a step.
pub(super) const MAX_DRAFT: usize = 8;
/// Largest number of sequences that share a step with drafts.
pub(super) const MAX_COMPANY: usize = 8;
/// Largest number of drafts of a step.
const MAX_ROWS: usize = MAX_COMPANY * MAX_DRAFT;

/// Most that an account holds, in plain steps: what a first draft of a head may cost, of which nothing is known.
const CREDIT: f64 = 3.0;
/// What a token adds to an account.
const REGAIN: f64 = 0.0045;
/// The part of all steps' time that makes up for prompts a draft model has read, along with what drafts save; and the
/// most of that which is kept for later, in plain steps.
const FOLLOWED: f64 = 0.01;
const MAX_SLACK: f64 = 64.0;
/// Share of [`CREDIT`] from which drafts are tried that are not expected to pay.
const TRIED_FROM: f64 = 0.95;
/// By how much drafts have to be faster than none.
const MARGIN: f64 = 1.02;
/// Steps with drafts after which a plain one is measured again.
const REFRESH: u32 = 32;

/// Odds of a draft of which nothing is known.
const FIRST_ODDS: f64 = 0.6;
/// Weight of the newest draft in the odds of a sequence, and in those that new sequences begin with.
const NEWEST_DRAFT: f64 = 1.0 / 8.0;
const NEWEST_OF_ALL: f64 = 1.0 / 24.0;
/// Weight of the newest time, and of a plain step's after steps with drafts: contexts grow, and machines get busy.
const NEWEST_TIME: f64 = 0.25;
const NEWEST_PLAIN: f64 = 0.5;
/// By how much a time that is longer than it should be is believed to fall with every plain step.
const HOPE: f64 = 0.98;
/// Largest factor by which one time may differ from what was known: beyond it is chance.
const MAX_JUMP: f64 = 4.0;

/// What drafts have cost a sequence, and how often they were right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Account {
    /// Plain steps that may be lost.
    credit: f64,
    /// How often each draft is right where those before it are.
    odds: [f64; MAX_DRAFT],
}

impl Default for Account {
    fn default() -> Account {
        Account { credit: CREDIT, odds: [FIRST_ODDS; MAX_DRAFT] }
    }
}

impl Account {
    /// Counts the drafts of a step. Where all were right, further ones might have been, and their odds rise a little:
    /// so they are tried now and then.
    fn judge(&mut self, n_drafted: usize, n_accepted: usize, newest: f64) {
        let n_judged = if n_accepted < n_drafted { n_accepted + 1 } else { self.odds.len() };
        for (i, odds) in self.odds.iter_mut().enumerate().take(if n_drafted > 0 { n_judged } else { 0 }) {
            let is_right = i < n_accepted || i >= n_drafted;
            let weight = if i < n_drafted { newest } else { newest / 8.0 };
            *odds += (f64::from(u8::from(is_right)) - *odds) * weight;
        }
    }

    /// Whether it has more than looking for forced tokens may cost.
    pub fn is_sound(&self) -> bool {
        self.credit > CREDIT / 2.0
    }

    /// A token that no draft had to do with.
    pub fn rest(&mut self) {
        self.credit = (self.credit + REGAIN).min(CREDIT);
    }
}

/// A sequence of the step that is being made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub account: Account,
    /// Largest number of its drafts.
    pub max: usize,
    /// Its first drafts that its grammar forces: these are right.
    pub n_sure: usize,
    /// Drafts that it is to have.
    pub n: usize,
}

impl Candidate {
    pub fn new(account: Account, max: usize) -> Candidate {
        Candidate { account, max: max.min(MAX_DRAFT), n_sure: 0, n: 0 }
    }

    /// How often its next draft becomes a token; 0 where it has no more.
    fn next(&self) -> f64 {
        let first = self.n_sure.min(self.n + 1);
        if self.n < self.max { self.account.odds[first..=self.n].iter().product() } else { 0.0 }
    }
}

/// A measured time.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    seconds: f64,
    /// Number of measurements, up to 2. The first may have loaded kernels or weights; the second replaces it.
    n: u8,
}

impl Measured {
    fn observe(&mut self, seconds: f64, newest: f64) {
        let now = seconds.max(1e-9);
        if self.n < 2 {
            *self = Measured { seconds: now, n: self.n + 1 };
        } else {
            self.seconds *= (now / self.seconds).clamp(1.0 / MAX_JUMP, MAX_JUMP).powf(newest);
        }
    }

    /// A time above what it should be was chance: it is believed to fall, so that it is tried again.
    fn hope(&mut self, most: f64) {
        if self.seconds > most {
            self.seconds = (self.seconds * HOPE).max(most);
        }
    }
}

/// What steps cost, and what new sequences begin with.
#[derive(Clone, Debug)]
pub(super) struct Payoff {
    /// Steps by their number of sequences, less one, and of drafts.
    steps: [[Measured; MAX_ROWS + 1]; MAX_COMPANY],
    /// A step of the draft head, or of the draft model.
    head: Measured,
    /// Steps with drafts since the last plain one.
    since_plain: u32,
    /// Steps with drafts.
    n_drafted: usize,
    /// New sequences begin where the last ones are.
    first: Account,
    /// Seconds that a draft model may take for prompts; less than none while that is made up for.
    slack: f64,
    /// Seconds of a plain step, a sequence's part of it.
    share: f64,
}

impl Payoff {
    pub fn new() -> Payoff {
        Payoff {
            steps: [[Measured::default(); MAX_ROWS + 1]; MAX_COMPANY],
            head: Measured::default(),
            since_plain: 0,
            n_drafted: 0,
            first: Account::default(),
            slack: 0.0,
            share: 0.0,
        }
    }

    /// Returns the account of a new sequence: short answers one after the other lose no more than a long one.
    pub fn open(&self) -> Account {
        self.first
    }

    /// Chooses the drafts of the sequences that share a step, at most `max` in all. `has_ahead` says that the model's
    /// head or a draft model drafts, a step of it for the next draft of every sequence.
    pub fn choose(&self, candidates: &mut [Candidate], max: usize, has_ahead: bool) {
        candidates.iter_mut().for_each(|candidate| candidate.n = 0);
        let n = candidates.len();
        let Some(steps) = n.checked_sub(1).and_then(|i| self.steps.get(i)) else { return };
        if steps[0].n < 2 || self.since_plain >= REFRESH {
            return;
        }
        let plain = steps[0].seconds;
        let credit = candidates.iter().map(|c| c.account.credit).fold(CREDIT, f64::min);
        let max = max.min(n * MAX_DRAFT);
        // Tokens per second by the number of drafts, the likeliest first.
        let mut order = [0u8; MAX_ROWS];
        let (mut tokens, mut depth) = (n as f64, 0);
        let mut best = (MARGIN * tokens / plain, 0);
        for n_drafts in 1..=max {
            let Some((i, gain)) = likeliest(candidates) else { break };
            depth = depth.max(candidates[i].n + 1);
            let Some(time) = likely(steps, n_drafts) else { break };
            if !self.is_covered(steps, n, n_drafts, if has_ahead { depth } else { 0 }, credit) {
                break;
            }
            candidates[i].n += 1;
            order[n_drafts - 1] = i as u8;
            tokens += gain;
            let speed = tokens / (time + if has_ahead { depth as f64 * self.head.seconds } else { 0.0 });
            if speed > best.0 {
                best = (speed, n_drafts);
            }
        }
        let n_chosen = candidates.iter().map(|candidate| candidate.n).sum::<usize>();
        order[best.1..n_chosen].iter().for_each(|&i| candidates[usize::from(i)].n -= 1);
        if best.1 == 0 && credit >= TRIED_FROM * CREDIT {
            self.try_some(candidates, max, has_ahead, credit);
        }
    }

    /// Drafts that are not expected to pay, of the likeliest sequence: times and odds may have changed. Numbers that
    /// were not measured come first.
    fn try_some(&self, candidates: &mut [Candidate], max: usize, has_ahead: bool, credit: f64) {
        let n = candidates.len();
        let steps = &self.steps[n - 1];
        let Some((i, _)) = likeliest(candidates) else { return };
        let max = candidates[i].max.min(max);
        let covers = |&k: &usize| self.is_covered(steps, n, k, if has_ahead { k } else { 0 }, credit);
        let new = (1..=max).find(|&k| steps[k].n < 2).filter(covers);
        let next = (max > 0).then(|| 1 + self.n_drafted % max.max(1)).filter(covers);
        let one = Some(1).filter(|&k| k <= max).filter(covers);
        candidates[i].n = new.or(next).or(one).unwrap_or(0);
    }

    /// Whether a credit covers a step whose drafts, as many steps of the head as `depth` for them, are all wrong.
    fn is_covered(
        &self,
        steps: &[Measured; MAX_ROWS + 1],
        n: usize,
        n_drafts: usize,
        depth: usize,
        credit: f64,
    ) -> bool {
        let plain = steps[0].seconds;
        // A head is a part of the model.
        let head = if self.head.n > 0 { self.head.seconds } else { plain };
        most(steps, n, n_drafts) + depth as f64 * head - plain <= credit * plain
    }

    /// A step of `n` sequences with `n_drafts` took `step` seconds, and making drafts `drafting`. Returns what its
    /// sequences are charged, in plain steps.
    pub fn observe(&mut self, n: usize, n_drafts: usize, step: f64, drafting: f64) -> f64 {
        let Some(steps) = n.checked_sub(1).and_then(|i| self.steps.get_mut(i)).filter(|_| n_drafts <= MAX_ROWS) else {
            return 1.0;
        };
        let (plain, is_known) = (steps[0].seconds, steps[0].n == 2);
        let charged = if steps[n_drafts].n == 0 { step.min(most(steps, n, n_drafts)) } else { step };
        let is_late = n_drafts == 0 && self.since_plain > 0;
        steps[n_drafts].observe(step, if is_late { NEWEST_PLAIN } else { NEWEST_TIME });
        self.first.credit = CREDIT;
        self.share = if is_known { plain / n as f64 } else { 0.0 };
        self.slack += FOLLOWED * (step + drafting);
        if n_drafts == 0 {
            self.since_plain = 0;
            let plain = steps[0].seconds;
            for (n_drafts, measured) in steps.iter_mut().enumerate().skip(1) {
                measured.hope(plain * (1.0 + n_drafts as f64 / n as f64));
            }
            self.head.hope(plain);
            return if is_known { 1.0 + drafting / plain } else { 1.0 };
        }
        self.since_plain += 1;
        self.n_drafted += 1;
        if is_known { (charged + drafting) / plain } else { 1.0 }
    }

    /// `n` steps of the head took `seconds`.
    pub fn observe_head(&mut self, n: usize, seconds: f64) {
        self.head.observe(seconds / n.max(1) as f64, NEWEST_TIME);
    }

    /// Whether a draft model may begin to compute what it has not seen of a sequence.
    pub fn may_follow(&self) -> bool {
        self.slack >= 0.0
    }

    /// A draft model took `seconds` for that.
    pub fn followed(&mut self, seconds: f64) {
        self.slack -= seconds;
    }

    /// Charges a sequence for its part of a step: `bill` plain steps, for a token and those of its drafts that were
    /// right.
    pub fn charge(&mut self, account: &mut Account, bill: f64, n_drafted: usize, n_accepted: usize) {
        let tokens = 1.0 + n_accepted as f64;
        account.credit = (account.credit - bill + tokens * (1.0 + REGAIN)).clamp(-CREDIT, CREDIT);
        self.slack = (self.slack + (tokens - bill) * self.share).min(MAX_SLACK * self.share);
        account.judge(n_drafted, n_accepted, NEWEST_DRAFT);
        self.first.judge(n_drafted, n_accepted, NEWEST_OF_ALL);
        self.first.credit = self.first.credit.min(account.credit);
    }
}

/// The candidate whose next draft is the likeliest to become a token, and how likely that is.
fn likeliest(candidates: &[Candidate]) -> Option<(usize, f64)> {
    let odds = candidates.iter().map(Candidate::next).enumerate();
    odds.filter(|&(_, gain)| gain > 0.0).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// Seconds that a step probably takes: measured, between two that were, or one draft beyond, in a straight line. What
/// is hoped for here is tried where an account covers the worst.
fn likely(steps: &[Measured; MAX_ROWS + 1], n_drafts: usize) -> Option<f64> {
    let is_known = |&i: &usize| steps[i].n > 0;
    let below = (0..=n_drafts).rev().find(is_known)?;
    let a = steps[below].seconds;
    if below == n_drafts {
        return Some(a);
    }
    let line = |from: usize, to: usize| {
        let slope = (steps[to].seconds - steps[from].seconds) / (to - from) as f64;
        a + slope.max(0.0) * (n_drafts - below) as f64
    };
    match ((n_drafts..=MAX_ROWS).find(is_known), (0..below).rev().find(is_known)) {
        (Some(above), _) => Some(line(below, above)),
        _ if n_drafts > below + 1 => None,
        (None, Some(before)) => Some(line(before, below)),
        (None, None) => Some(a),
    }
}

/// Seconds that a step takes at most: as long as one that has more drafts; beyond those, each adds what a sequence
/// costs. A first measurement is not believed where it is longer.
fn most(steps: &[Measured; MAX_ROWS + 1], n: usize, n_drafts: usize) -> f64 {
    let below = (0..n_drafts).rev().find(|&i| steps[i].n == 2).unwrap_or(0);
    let most = steps[below].seconds + (n_drafts - below) as f64 * steps[0].seconds / n as f64;
    match (n_drafts..=MAX_ROWS).find(|&i| steps[i].n > 0).map(|i| steps[i]) {
        Some(Measured { seconds, n: 2 }) => seconds,
        Some(Measured { seconds, .. }) => most.min(seconds),
        None => most,
    }
}

#[cfg(test)]
mod tests;
