//! Which expert has which slab: what is held, what is under way, what is pinned, and what goes next.
//!
//! Pure bookkeeping: it reads nothing and knows no bytes, threads or clocks. Its owner tells it what ops want and which
//! reads ended, and reads what it says.
//!
//! # Replacement
//! The expert goes whose next use is farthest away. Layers come in turn, so an expert is wanted at the earliest when
//! its layer comes; and then with a probability that its share of the last tokens tells, where a token counts half as
//! much as one [`HALF_LIFE`] tokens later (recency and frequency in one number). With long chunks of prompts every
//! expert is used in every step, and what remains is the distance of the layer: the layers that come next are kept, not
//! the one used last, which is the last to come again.

use std::ops::Range;

use super::layout::Layout;

/// Tokens after which a use counts half.
const HALF_LIFE: f32 = 256.0;
/// Victims that are chosen at a time.
const VICTIMS: usize = 64;
/// No slab, no expert.
const NONE: u32 = u32::MAX;

/// What became of a wish for an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is in this slab, which is pinned now.
    Held(u32),
    /// It is being read into this slab, which is pinned now.
    Coming(u32),
    /// The caller reads it into this slab, which is pinned now.
    Read(u32),
    /// Every slab is pinned or being read into.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is in it, or its read failed.
    Empty,
    /// Its expert is being read.
    Coming,
    /// Its expert is there.
    Held,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    expert: u32, // or NONE
    state: State,
    pins: u32,
}

#[derive(Clone, Copy, Debug)]
struct Expert {
    slab: u32, // or NONE
    layer: u32,
    /// Share of the tokens up to `at` that used it; later ones have not.
    rate: f32,
    at: u64,
    /// Step for which it was prefetched.
    expected: u64,
}

/// Experts of a layer.
#[derive(Clone, Copy, Debug)]
struct Layer {
    class: usize,
    first: u32,
}

/// The slabs of all layers.
#[derive(Clone, Debug)]
pub struct Store {
    layers: Vec<Layer>,
    classes: Vec<Range<u32>>,
    slabs: Vec<Slab>,
    experts: Vec<Expert>,
    /// Empty slabs of each class that nothing pins.
    empty: Vec<Vec<u32>>,
    /// Slabs of each class that go next, the first one last.
    victims: Vec<Vec<(f32, u32)>>,
    /// Room to choose them.
    candidates: Vec<(f32, u32)>,
    /// Tokens before this step.
    clock: u64,
    /// Tokens of this step.
    n_tokens: u32,
    step: u64,
    /// The layer that computes.
    layer: usize,
}

impl Store {
    /// Empty slabs.
    pub fn new(layout: &Layout) -> Store {
        let mut experts = Vec::with_capacity(layout.n_experts());
        let layers = layout.layers.iter().enumerate().map(|(i, layer)| {
            let first = experts.len() as u32;
            let rate = layer.n_used as f32 / layer.n_expert.max(1) as f32;
            let expert = Expert { slab: NONE, layer: i as u32, rate, at: 0, expected: 0 };
            experts.extend((0..layer.n_expert).map(|_| expert));
            Layer { class: layer.class, first }
        });
        let layers = layers.collect();
        let mut n = 0;
        let classes = layout.classes.iter().map(|class| {
            n += class.n_slabs as u32;
            n - class.n_slabs as u32..n
        });
        let classes: Vec<Range<u32>> = classes.collect();
        Store {
            layers,
            slabs: vec![Slab { expert: NONE, state: State::Empty, pins: 0 }; n as usize],
            experts,
            empty: classes.iter().map(|class| class.clone().rev().collect()).collect(),
            victims: classes.iter().map(|_| Vec::with_capacity(VICTIMS)).collect(),
            candidates: Vec::with_capacity(n as usize),
            classes,
            clock: 0,
            n_tokens: 1,
            step: 0,
            layer: 0,
        }
    }

    /// Bytes that [`Store::new`] allocates.
    pub fn bytes(layout: &Layout) -> usize {
        let of_slab = size_of::<Slab>() + size_of::<u32>() + size_of::<(f32, u32)>();
        let of_class = 2 * size_of::<Vec<u32>>() + size_of::<Range<u32>>() + VICTIMS * size_of::<(f32, u32)>();
        layout.n_slabs() * of_slab
            + layout.n_experts() * size_of::<Expert>()
            + layout.layers.len() * size_of::<Layer>()
            + layout.classes.len() * of_class
    }

    /// A step of `n_tokens` begins.
    pub fn start_step(&mut self, n_tokens: usize) {
        self.clock += u64::from(self.n_tokens);
        self.n_tokens = n_tokens.max(1) as u32;
        self.step += 1;
    }

    /// The op of `layer` begins.
    pub fn start_layer(&mut self, layer: usize) {
        self.layer = layer;
        self.victims.iter_mut().for_each(Vec::clear);
    }

    /// `count` tokens of this step use an expert.
    pub fn used(&mut self, layer: usize, expert: usize, count: usize) {
        let key = self.key(layer, expert);
        let n = self.n_tokens as f32;
        let kept = self.rate(key);
        let expert = &mut self.experts[key as usize];
        expert.rate = kept * decay(n) + count as f32 / n * (1.0 - decay(n));
        expert.at = self.clock + u64::from(self.n_tokens);
    }

    /// Whether an expert is in a slab or on its way there.
    pub fn has(&self, layer: usize, expert: usize) -> bool {
        self.experts[self.key(layer, expert) as usize].slab != NONE
    }

    /// Wants an expert for the op that computes, and pins its slab.
    pub fn want(&mut self, layer: usize, expert: usize) -> Found {
        let key = self.key(layer, expert);
        let slab = match self.experts[key as usize].slab {
            NONE => match self.take(self.layers[layer].class, f32::NEG_INFINITY) {
                Some(slab) => {
                    self.assign(slab, key);
                    self.slabs[slab as usize].pins = 1;
                    return Found::Read(slab);
                }
                None => return Found::Full,
            },
            slab => slab,
        };
        let Slab { state, pins, .. } = &mut self.slabs[slab as usize];
        *pins += 1;
        if *state == State::Held { Found::Held(slab) } else { Found::Coming(slab) }
    }

    /// Wants an expert for a later layer of this step, or layer 0 of the next one: the slab to read it into, unless
    /// it is there or every slab is of more use.
    pub fn prefetch(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let key = self.key(layer, expert);
        let step = if layer > self.layer { self.step } else { self.step + 1 };
        self.experts[key as usize].expected = step;
        if self.experts[key as usize].slab != NONE {
            return None;
        }
        let slab = self.take(self.layers[layer].class, self.next_use(key))?;
        self.assign(slab, key);
        Some(slab)
    }

    /// Whether a slab is held and has its expert.
    pub fn is_held(&self, slab: u32) -> bool {
        self.slabs[slab as usize].state == State::Held
    }

    /// The expert that is to be in a slab: its layer and its number.
    pub fn expert_of(&self, slab: u32) -> Option<(usize, usize)> {
        let expert = self.experts.get(self.slabs[slab as usize].expert as usize)?;
        let layer = expert.layer as usize;
        Some((layer, (self.slabs[slab as usize].expert - self.layers[layer].first) as usize))
    }

    /// A read ended well.
    pub fn arrived(&mut self, slab: u32) {
        debug_assert_eq!(self.slabs[slab as usize].state, State::Coming);
        self.slabs[slab as usize].state = State::Held;
    }

    /// A read failed or was dropped: the slab is empty.
    pub fn failed(&mut self, slab: u32) {
        let Slab { expert, state, pins } = &mut self.slabs[slab as usize];
        debug_assert_eq!(*state, State::Coming);
        *state = State::Empty;
        self.experts[std::mem::replace(expert, NONE) as usize].slab = NONE;
        if *pins == 0 {
            self.give(slab);
        }
    }

    /// Takes a pin off a slab.
    pub fn unpin(&mut self, slab: u32) {
        let Slab { state, pins, .. } = &mut self.slabs[slab as usize];
        debug_assert!(*pins > 0);
        *pins = pins.saturating_sub(1);
        if *pins == 0 && *state == State::Empty {
            self.give(slab);
        }
    }

    /// Whether a slab is pinned.
    pub fn is_pinned(&self, slab: u32) -> bool {
        self.slabs[slab as usize].pins > 0
    }

    fn key(&self, layer: usize, expert: usize) -> u32 {
        self.layers[layer].first + expert as u32
    }

    fn assign(&mut self, slab: u32, key: u32) {
        self.slabs[slab as usize] = Slab { expert: key, state: State::Coming, pins: 0 };
        self.experts[key as usize].slab = slab;
    }

    /// An empty slab returns to its class.
    fn give(&mut self, slab: u32) {
        let class = self.classes.iter().position(|class| class.contains(&slab)).unwrap_or(0);
        self.empty[class].push(slab);
    }

    /// A slab that is empty, or whose expert is wanted later than `than`; the caller assigns it.
    fn take(&mut self, class: usize, than: f32) -> Option<u32> {
        if let Some(slab) = self.empty[class].pop() {
            return Some(slab);
        }
        loop {
            if self.victims[class].is_empty() && !self.choose_victims(class) {
                return None;
            }
            while let Some(&(next_use, slab)) = self.victims[class].last() {
                if next_use <= than {
                    return None;
                }
                self.victims[class].pop();
                // Chosen before, it may have been pinned or be wanted sooner since.
                let Slab { expert, state, pins } = self.slabs[slab as usize];
                if state == State::Held && pins == 0 && self.next_use(expert) >= next_use {
                    self.experts[expert as usize].slab = NONE;
                    self.slabs[slab as usize] = Slab { expert: NONE, state: State::Empty, pins: 0 };
                    return Some(slab);
                }
            }
        }
    }

    /// Chooses the slabs of a class that go next; false when all are pinned or being read into.
    fn choose_victims(&mut self, class: usize) -> bool {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for slab in self.classes[class].clone() {
            let Slab { expert, state, pins } = self.slabs[slab as usize];
            if state == State::Held && pins == 0 {
                candidates.push((self.next_use(expert), slab));
            }
        }
        let sooner = |a: &(f32, u32), b: &(f32, u32)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        let n_kept = candidates.len().saturating_sub(VICTIMS);
        if n_kept > 0 {
            candidates.select_nth_unstable_by(n_kept, sooner);
        }
        self.victims[class].extend_from_slice(&candidates[n_kept..]);
        self.victims[class].sort_unstable_by(sooner);
        self.candidates = candidates;
        !self.victims[class].is_empty()
    }

    /// Layers until an expert is wanted again, as far as that can be expected.
    fn next_use(&self, key: u32) -> f32 {
        let expert = &self.experts[key as usize];
        let (layer, n_layers) = (expert.layer as usize, self.layers.len());
        let distance = ((layer + n_layers - self.layer - 1) % n_layers) as f32;
        if expert.expected > self.step || expert.expected == self.step && layer > self.layer {
            return distance;
        }
        let is_used = 1.0 - (1.0 - self.rate(key)).max(0.0).powi(self.n_tokens as i32);
        distance + n_layers as f32 * (1.0 / is_used.max(1e-6) - 1.0)
    }

    /// The share of the tokens before this step that used an expert, late ones counting more.
    fn rate(&self, key: u32) -> f32 {
        let expert = &self.experts[key as usize];
        expert.rate * decay(self.clock.saturating_sub(expert.at) as f32)
    }
}

/// What a use counts `tokens` later.
fn decay(tokens: f32) -> f32 {
    (-tokens / HALF_LIFE).exp2()
}
