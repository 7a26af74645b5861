//! Which experts of each layer have slots on the device, by use: a table that kernels and host read in a step, and
//! changed between steps only. Knows no driver, no bytes and no clock.
//!
//! An expert leaves the table before its slot is written to, and the one that comes enters it after all of its weights
//! have arrived: whatever a step's table says holds for the whole step.

use std::time::Duration;

/// No slot, in tables.
pub const NONE: u32 = u32::MAX;

/// Tokens after which a use counts half.
const HALF_LIFE: f64 = 1024.0;
/// An expert takes another's slot where it was used so much more: what is gained has to pay for the copy.
const MARGIN: f64 = 1.25;
/// And by so many uses, so that few tokens move nothing.
const LEAST: f64 = 2.0;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    /// Being written: in no table.
    Loading(u32),
    Ready(u32),
}

/// An expert on its way to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Number of its layer.
    pub layer: usize,
    /// Where it goes.
    pub slot: u32,
    /// Which of the layer's experts.
    pub expert: u32,
}

struct Layer {
    slots: Vec<Slot>,
    /// Slot of each expert, `[n_expert]`.
    table: Vec<u32>,
    /// Decayed uses of each expert, in units that grow.
    uses: Vec<f64>,
}

impl Layer {
    /// The expert that gains most by a slot, the slot that loses least by it, and how much is gained.
    fn best(&self, unit: f64) -> Option<(f64, u32, u32)> {
        let is_coming = |expert: u32| self.slots.contains(&Slot::Loading(expert));
        let outside = (0..self.table.len() as u32).filter(|&e| self.table[e as usize] == NONE && !is_coming(e));
        let expert = outside.max_by(|&a, &b| self.uses[a as usize].total_cmp(&self.uses[b as usize]))?;
        let worth = |slot: &Slot| match *slot {
            Slot::Empty => Some(0.0),
            Slot::Loading(_) => None,
            Slot::Ready(expert) => Some(self.uses[expert as usize]),
        };
        let slots = (0u32..).zip(&self.slots).filter_map(|(i, slot)| Some((worth(slot)?, i)));
        let (lost, slot) = slots.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let won = self.uses[expert as usize];
        (won > MARGIN * lost + LEAST * unit).then_some((won - lost, slot, expert))
    }
}

/// The slots of all layers.
pub struct Placement {
    layers: Vec<Layer>,
    /// What a use counts now.
    unit: f64,
}

impl Placement {
    /// Layers of so many experts and slots, all empty.
    pub fn new(layers: impl Iterator<Item = (usize, usize)>) -> Placement {
        let layer = |(n_expert, n_slots): (usize, usize)| Layer {
            slots: vec![Slot::Empty; n_slots.min(n_expert)],
            table: vec![NONE; n_expert],
            uses: vec![0.0; n_expert],
        };
        Placement { layers: layers.map(layer).collect(), unit: 1.0 }
    }

    /// The slot of each expert of a layer.
    pub fn table(&self, layer: usize) -> &[u32] {
        &self.layers[layer].table
    }

    /// Tables of all layers, one behind the other.
    pub fn tables(&self) -> impl Iterator<Item = u32> {
        self.layers.iter().flat_map(|layer| layer.table.iter().copied())
    }

    /// Counts the experts that tokens chose; ids of no expert are none.
    pub fn count(&mut self, layer: usize, ids: &[u32]) {
        for &id in ids {
            if let Some(uses) = self.layers[layer].uses.get_mut(id as usize) {
                *uses += self.unit;
            }
        }
    }

    /// So many tokens are over: what was counted before counts less.
    pub fn age(&mut self, tokens: usize) {
        self.unit *= (tokens as f64 / HALF_LIFE).exp2();
        if self.unit > 1e100 {
            self.layers.iter_mut().flat_map(|layer| &mut layer.uses).for_each(|uses| *uses /= self.unit);
            self.unit = 1.0;
        }
    }

    /// The move that gains most, which begins: the expert that had the slot is in no table from now on.
    pub fn begin(&mut self) -> Option<Move> {
        let unit = self.unit;
        let of_layer =
            |(layer, own): (usize, &Layer)| own.best(unit).map(|(gain, slot, expert)| (gain, layer, slot, expert));
        let best = self.layers.iter().enumerate().filter_map(of_layer).max_by(|a, b| a.0.total_cmp(&b.0));
        let (_, layer, slot, expert) = best?;
        let own = &mut self.layers[layer];
        if let Slot::Ready(before) = own.slots[slot as usize] {
            own.table[before as usize] = NONE;
        }
        own.slots[slot as usize] = Slot::Loading(expert);
        Some(Move { layer, slot, expert })
    }

    /// All of a move's weights have arrived.
    pub fn end(&mut self, done: Move) {
        let own = &mut self.layers[done.layer];
        if own.slots[done.slot as usize] == Slot::Loading(done.expert) {
            own.slots[done.slot as usize] = Slot::Ready(done.expert);
            own.table[done.expert as usize] = done.slot;
        }
    }

    /// A move came to nothing: its slot holds anything.
    pub fn fail(&mut self, failed: Move) {
        let slot = &mut self.layers[failed.layer].slots[failed.slot as usize];
        if *slot == Slot::Loading(failed.expert) {
            *slot = Slot::Empty;
        }
    }

    /// Empties all slots and fills them with the experts that were used most; they are in the tables when the caller
    /// has copied them, which it does before the next step.
    pub fn refill(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        for (layer, own) in self.layers.iter_mut().enumerate() {
            let mut experts: Vec<u32> = (0..own.table.len() as u32).collect();
            experts.sort_by(|&a, &b| own.uses[b as usize].total_cmp(&own.uses[a as usize]));
            own.table.fill(NONE);
            for (slot, &expert) in (0u32..).zip(experts.iter().take(own.slots.len())) {
                own.slots[slot as usize] = Slot::Ready(expert);
                own.table[expert as usize] = slot;
                moves.push(Move { layer, slot, expert });
            }
        }
        moves
    }

    /// The share of the uses of a layer's experts that its slots hold where the most used have them; none where nothing
    /// was counted.
    pub fn best_share(&self, layer: usize) -> Option<f64> {
        let own = &self.layers[layer];
        let mut uses = own.uses.clone();
        uses.sort_by(|a, b| b.total_cmp(a));
        let sum: f64 = uses.iter().sum();
        (sum > 0.0).then(|| uses[..own.slots.len()].iter().sum::<f64>() / sum)
    }
}

/// How routed experts lie on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Whole layers.
    Layers = 0,
    /// Slots of single experts, in every layer.
    Slots = 1,
}

/// A step that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its tokens.
    pub tokens: usize,
    /// Whether each is of another sequence.
    pub is_single: bool,
    /// What it took.
    pub time: Duration,
}

/// What the last steps of single tokens took in a layout, in seconds, by their number of tokens less one.
#[derive(Clone, Debug, Default)]
struct Times(Vec<Vec<f64>>);

impl Times {
    /// Maximum number of tokens of a step that is timed.
    const MAX_TOKENS: usize = 64;
    /// Steps of a number of tokens that are kept.
    const KEPT: usize = 48;
    /// Steps of a number of tokens whose median says something.
    const FEWEST: usize = 8;

    fn add(&mut self, step: Step) {
        if self.0.len() < step.tokens {
            self.0.resize(step.tokens, Vec::new());
        }
        let Some(times) = self.0.get_mut(step.tokens.saturating_sub(1)) else { return };
        if times.len() == Self::KEPT {
            times.remove(0);
        }
        times.push(step.time.as_secs_f64());
    }

    /// Steps that count.
    fn n(&self) -> usize {
        self.0.iter().map(Vec::len).filter(|&n| n >= Self::FEWEST).sum()
    }

    /// Steps of numbers of tokens that both have, and what they take here and there.
    fn beside(&self, other: &Times) -> (usize, [f64; 2]) {
        let both = self.0.iter().zip(&other.0);
        let both = both.map(|(a, b)| (a.len().min(b.len()), a, b)).filter(|&(n, ..)| n >= Self::FEWEST);
        both.fold((0, [0.0; 2]), |(sum, [own, others]), (n, a, b)| {
            (sum + n, [own + n as f64 * median(a), others + n as f64 * median(b)])
        })
    }
}

/// Decides between the layouts by what steps of single tokens take in each: steps of as many tokens are compared.
///
/// Slots are tried where the uses say that the host has enough less to do, and when what they cost to fill is little
/// beside the time of such steps since the last change. They go where they are not faster in the end, and the next
/// trial comes after twice as many tokens.
#[derive(Clone, Debug)]
pub struct Judge {
    layout: Layout,
    /// Of each layout.
    times: [Times; 2],
    /// Tokens until the layout may change.
    left: usize,
    /// Tokens that a layout stays at least; doubled by every trial that lost.
    stays: usize,
    /// Slots are taken after the first step, and kept.
    is_forced: bool,
    /// Seconds that a change takes.
    cost: f64,
    /// Steps since the last change, and seconds of those that are timed.
    n_steps: usize,
    spent: f64,
}

impl Judge {
    /// Steps that are compared.
    const STEPS: usize = 48;
    /// Steps in which a trial finds as many of numbers of tokens that were timed before, or has lost.
    const PATIENCE: usize = 8 * Self::STEPS;
    /// Tokens that are counted before the first trial, and in which slots settle.
    const SETTLE: usize = 256;
    /// The share of the host's work that slots must save to be tried.
    const SAVES: f64 = 0.1;
    /// Slots that take more than this times the time of whole layers go.
    const LOSES: f64 = 0.99;
    /// A trial begins when steps have taken so many times what the change takes.
    const PAYS: f64 = 16.0;

    /// Whole layers first; `is_forced`: slots after the first step, whatever they cost.
    pub fn new(is_forced: bool) -> Judge {
        Judge {
            layout: Layout::Layers,
            times: Default::default(),
            left: Self::SETTLE,
            stays: 8 * Self::SETTLE,
            is_forced,
            cost: 0.0,
            n_steps: 0,
            spent: 0.0,
        }
    }

    /// The layout of now.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What a change takes, as far as that is known.
    pub fn set_cost(&mut self, cost: Duration) {
        self.cost = cost.as_secs_f64();
    }

    /// A step is over. `saves`: the share of the host's work that slots would save, asked for seldom. The layout to
    /// change to.
    pub fn step(&mut self, step: Step, saves: impl FnOnce() -> f64) -> Option<Layout> {
        if self.is_forced {
            return (self.layout == Layout::Layers).then(|| self.change(Layout::Slots, 0));
        }
        self.left = self.left.saturating_sub(step.tokens);
        self.n_steps += 1;
        if step.is_single && step.tokens <= Times::MAX_TOKENS {
            self.spent += step.time.as_secs_f64();
            self.times[self.layout as usize].add(step);
        }
        if self.left > 0 {
            return None;
        }
        match self.layout {
            Layout::Layers => {
                if self.times[0].n() < Self::STEPS || self.spent < Self::PAYS * self.cost {
                    return None;
                }
                self.left = Self::SETTLE;
                (saves() >= Self::SAVES).then(|| self.change(Layout::Slots, Self::SETTLE))
            }
            Layout::Slots => {
                let (n, [slots, layers]) = self.times[1].beside(&self.times[0]);
                if n < Self::STEPS && self.n_steps < Self::PATIENCE {
                    return None;
                }
                if n >= Self::STEPS && slots <= Self::LOSES * layers {
                    // Whole layers were measured behind shorter contexts, which flatters them.
                    self.left = Self::SETTLE;
                    self.n_steps = 0;
                    return None;
                }
                self.stays *= 2;
                Some(self.change(Layout::Layers, self.stays))
            }
        }
    }

    fn change(&mut self, to: Layout, stays: usize) -> Layout {
        self.layout = to;
        self.left = stays;
        (self.n_steps, self.spent) = (0, 0.0);
        self.times[to as usize] = Times::default();
        to
    }
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// A layer whose routes are simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Experts.
    pub n_expert: usize,
    /// Those that a token takes.
    pub n_used: usize,
    /// Slots.
    pub n_slots: usize,
}

/// The share of pairs whose experts have slots when recorded tokens are run, `[tokens][Σ n_used]`, after the first
/// fifth; a token moves at most `moves` experts.
pub fn simulate(layers: &[Shape], tokens: &[Vec<u16>], moves: usize) -> f64 {
    let mut placement = Placement::new(layers.iter().map(|layer| (layer.n_expert, layer.n_slots)));
    let (mut hits, mut all) = (0usize, 0usize);
    for (i, token) in tokens.iter().enumerate() {
        let mut rest = token.as_slice();
        for (layer, shape) in layers.iter().enumerate() {
            let (ids, others) = rest.split_at(shape.n_used.min(rest.len()));
            rest = others;
            let ids: Vec<u32> = ids.iter().map(|&id| id.into()).collect();
            if i >= tokens.len() / 5 {
                let has_slot = |&&id: &&u32| placement.table(layer).get(id as usize).is_some_and(|&s| s != NONE);
                hits += ids.iter().filter(has_slot).count();
                all += ids.len();
            }
            placement.count(layer, &ids);
        }
        placement.age(1);
        for _ in 0..moves {
            let Some(begun) = placement.begin() else { break };
            placement.end(begun);
        }
    }
    hits as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small numbers that look random.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % n.max(1)
        }
    }

    /// Slots as the device has them: a copy writes its halves at any time until it is done, and a step reads the slots
    /// that the table of its beginning names, from its beginning to its end.
    #[test]
    fn no_step_of_ten_thousand_schedules_reads_a_slot_that_is_written_or_holds_another() {
        let (mut moved, mut failed, mut read) = (0, 0, 0);
        for seed in 0..10_000 {
            let mut dice = Dice(seed);
            let shapes: Vec<(usize, usize)> =
                (0..1 + dice.below(3)).map(|_| (1 + dice.below(9), dice.below(6))).collect();
            let mut placement = Placement::new(shapes.iter().copied());
            // Halves of each slot's weights: the expert that each was written for.
            let mut memory: Vec<Vec<[u32; 2]>> = shapes.iter().map(|&(n, s)| vec![[NONE; 2]; s.min(n)]).collect();
            // Moves under way and the halves that are there.
            let mut coming: Vec<(Move, usize)> = Vec::new();
            for _ in 0..40 {
                // Between steps: what has come is seen, what failed is given up, and others begin.
                coming.retain(|&(m, halves)| {
                    if halves == 2 && dice.below(4) > 0 {
                        placement.end(m);
                        return false;
                    }
                    if halves == 1 && dice.below(8) == 0 {
                        placement.fail(m);
                        failed += 1;
                        return false;
                    }
                    true
                });
                for _ in 0..dice.below(3) {
                    if let Some(begun) = placement.begin() {
                        coming.push((begun, 0));
                        moved += 1;
                    }
                }
                if dice.below(50) == 0 && coming.is_empty() {
                    for Move { layer, slot, expert } in placement.refill() {
                        memory[layer][slot as usize] = [expert; 2];
                    }
                }
                // A step: copies go on at any moment of it.
                for (layer, &(n_expert, _)) in shapes.iter().enumerate() {
                    for (m, halves) in &mut coming {
                        if *halves < 2 && dice.below(3) == 0 {
                            memory[m.layer][m.slot as usize][*halves] = m.expert;
                            *halves += 1;
                        }
                    }
                    let ids: Vec<u32> = (0..2).map(|_| (dice.below(n_expert) * dice.below(2)) as u32).collect();
                    for &id in &ids {
                        let slot = placement.table(layer)[id as usize];
                        if slot != NONE {
                            assert_eq!(memory[layer][slot as usize], [id; 2], "seed {seed}, layer {layer}");
                            read += 1;
                        }
                    }
                    // No slot for two, and none that is written.
                    let table = placement.table(layer);
                    let mut taken: Vec<u32> = table.iter().copied().filter(|&slot| slot != NONE).collect();
                    taken.extend(coming.iter().filter(|(m, _)| m.layer == layer).map(|(m, _)| m.slot));
                    let n = taken.len();
                    taken.sort_unstable();
                    taken.dedup();
                    assert_eq!(taken.len(), n, "seed {seed}");
                    placement.count(layer, &ids);
                }
                placement.age(1);
            }
        }
        assert!(moved > 40_000 && failed > 1_000 && read > 100_000, "{moved} {failed} {read}");
    }

    /// Tokens of layers of 64 experts, of which each takes 4; `skew` of 8 choices fall on the first 16.
    fn routes(dice: &mut Dice, n: usize, skew: usize, first: usize) -> Vec<Vec<u16>> {
        let mut one = || {
            let expert = if dice.below(8) < skew { first + dice.below(16) } else { dice.below(64) };
            expert as u16 % 64
        };
        (0..n).map(|_| (0..12).map(|_| one()).collect()).collect()
    }

    /// Three such layers.
    fn layers(n_slots: usize) -> [Shape; 3] {
        [Shape { n_expert: 64, n_used: 4, n_slots }; 3]
    }

    #[test]
    fn slots_hold_what_is_used_and_follow_when_that_changes() {
        let mut dice = Dice(1);
        let uniform = simulate(&layers(16), &routes(&mut dice, 2_000, 0, 0), 1);
        let skewed = simulate(&layers(16), &routes(&mut dice, 2_000, 6, 0), 1);
        assert!((0.2..0.32).contains(&uniform) && skewed > 0.75, "{uniform} {skewed}");
        let mut changing = routes(&mut dice, 4_000, 6, 0);
        changing.extend(routes(&mut dice, 8_000, 6, 32));
        let changing = simulate(&layers(16), &changing, 1);
        assert!(changing > 0.6, "{changing}");
        assert_eq!(simulate(&layers(64), &routes(&mut dice, 5_000, 8, 0), 4), 1.0);
        assert_eq!(simulate(&layers(0), &routes(&mut dice, 10, 8, 0), 4), 0.0);
    }

    #[test]
    fn uniform_routing_seldom_moves() {
        let (mut dice, mut placement) = (Dice(5), Placement::new([(64, 16); 3].into_iter()));
        let mut moved = 0;
        for token in routes(&mut dice, 20_000, 0, 0) {
            for (layer, ids) in token.chunks(4).enumerate() {
                placement.count(layer, &ids.iter().map(|&id| id.into()).collect::<Vec<u32>>());
            }
            placement.age(1);
            while let Some(begun) = placement.begin() {
                placement.end(begun);
                moved += 1;
            }
        }
        // Far fewer than one in ten tokens.
        assert!(moved < 2_000, "{moved}");
    }

    /// The judge over steps of so many tokens in turn, which take so long in each layout.
    fn judged(layers: f64, slots: f64, saves: f64, tokens: &[usize], steps: usize) -> (Layout, usize, usize) {
        let mut judge = Judge::new(false);
        let (mut changes, mut in_slots) = (0, 0);
        for i in 0..steps {
            let time = [layers, slots][judge.layout() as usize];
            let tokens = tokens[i % tokens.len()];
            // More tokens take longer.
            let time = Duration::from_secs_f64(time * (3 + tokens) as f64);
            in_slots += judge.layout() as usize;
            let step = Step { tokens, is_single: tokens <= 64, time };
            changes += usize::from(judge.step(step, || saves).is_some());
        }
        (judge.layout(), changes, in_slots)
    }

    #[test]
    fn slots_stay_where_they_win_and_go_where_they_lose() {
        // One sequence; eight; numbers that change; prompts between them.
        for tokens in [&[1][..], &[8], &[6, 7, 8, 7], &[1, 1, 1, 1, 1, 1, 1, 1, 512]] {
            assert_eq!(judged(10e-3, 8e-3, 0.3, tokens, 5_000).0, Layout::Slots, "{tokens:?}");
            assert_eq!(judged(10e-3, 8e-3, 0.3, tokens, 5_000).1, 1, "{tokens:?}");
            // Nothing to win: never tried.
            assert_eq!(judged(10e-3, 8e-3, 0.05, tokens, 5_000), (Layout::Layers, 0, 0), "{tokens:?}");
            // They lose: a small and shrinking share of the time.
            let (layout, changes, in_slots) = judged(10e-3, 10.5e-3, 0.3, tokens, 100_000);
            assert_eq!(layout, Layout::Layers, "{tokens:?}");
            assert!(changes <= 24 && in_slots < 4_000, "{changes} {in_slots} {tokens:?}");
        }
        // Prompts alone say nothing.
        assert_eq!(judged(10e-3, 8e-3, 0.3, &[512], 5_000), (Layout::Layers, 0, 0));
    }

    /// Steps of as many tokens are compared, so that a step with more of them does not pass for a slower one.
    #[test]
    fn what_was_timed_with_other_numbers_of_tokens_says_nothing() {
        let mut judge = Judge::new(false);
        let step = |tokens, time| Step { tokens, is_single: true, time: Duration::from_secs_f64(time) };
        // One sequence, until slots are tried; then eight, whose steps take longer, and after a while one again.
        while judge.step(step(1, 10e-3), || 0.3).is_none() {}
        for _ in 0..100 {
            assert_eq!(judge.step(step(8, 30e-3), || 0.3), None);
        }
        for _ in 0..1_000 {
            assert_eq!(judge.step(step(1, 8e-3), || 0.3), None);
        }
        assert_eq!(judge.layout(), Layout::Slots);
        // Nothing that can be compared: slots go after a while.
        let mut judge = Judge::new(false);
        while judge.step(step(1, 10e-3), || 0.3).is_none() {}
        let until = (0..10_000).find(|_| judge.step(step(8, 3e-3), || 0.3).is_some());
        assert!(until.is_some_and(|n| n < 500), "{until:?}");
        assert_eq!(judge.layout(), Layout::Layers);
    }

    /// A trial begins when its cost is little beside the time that went by: few tokens never pay for it.
    #[test]
    fn slots_are_filled_when_that_is_little_beside_the_time_so_far() {
        for cost in [0.0, 0.1, 1.0] {
            let mut judge = Judge::new(false);
            judge.set_cost(Duration::from_secs_f64(cost));
            let step = Step { tokens: 1, is_single: true, time: Duration::from_millis(10) };
            // Prompts ahead of it, by which tokens alone would be enough.
            judge.step(Step { tokens: 2048, is_single: false, time: Duration::from_secs(60) }, || 0.3);
            let tried = (1..2_000).find(|_| judge.step(step, || 0.3).is_some());
            let seconds = tried.map_or(0.0, |n| n as f64 * 10e-3);
            assert!(seconds >= 16.0 * cost - 0.02 && seconds < 16.0 * cost + 0.5, "{cost} {seconds}");
        }
    }
}
