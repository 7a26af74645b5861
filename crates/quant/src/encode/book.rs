//! The search for entries of code books: which entries of a super-block, with which sub-scales and scale, leave the
//! least weighted squared error. Knows no bytes; the formats are in `grid`.
//!
//! At a scale `s` an entry `q` costs `Σ w·(x - s·q)²`, which is `s²·b - 2·s·a` and a constant, with `a = Σ w·x·q` and
//! `b = Σ w·q²`. Both are computed once for the entries that come into question, a list for each group of values, so
//! that a scale is tried in three operations an entry.

use std::sync::OnceLock;

use fearless_simd::Level;
use half::f16;

use super::block::{Block, over};
use crate::level::at_level;

/// Entries of a list: those nearest to the values. Error of 262,144 normal weights with lists of 32, 48, 64, 128: IQ1_S
/// 0.3794, 0.3785, 0.3779, 0.3775; IQ2_XXS 0.2491, 0.2487, 0.2486, 0.2484, and 0.2484 with the whole book.
const NEAR: usize = 48;
/// Lanes of the sums over lists.
const LANES: usize = 8;
/// Points of the lattice of half an entry, at most: 3^4, and 8^2 of IQ3.
const HALF: usize = 81;

/// Rounds of entries for scales, and a scale for entries.
const ROUNDS: usize = 2;

/// How the groups of a sub-block depend on each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Join {
    /// They do not: every value has a sign.
    Signs,
    /// A group has an even number of minus signs. Where that of its values is odd, one sign is wrong.
    EvenSigns,
    /// Two groups have an even number of minus signs. The second variant of an entry has one sign wrong.
    EvenSignsOfTwo,
    /// 1 is added to the entries of all groups, or, second variant, taken off.
    OffsetOfAll,
    /// 1 is added to the entries of a group, or, second variant, taken off.
    OffsetOfEach,
}

impl Join {
    fn has_signs(self) -> bool {
        matches!(self, Self::Signs | Self::EvenSigns | Self::EvenSignsOfTwo)
    }

    /// Variants of an entry.
    fn n_variant(self) -> usize {
        if matches!(self, Self::Signs | Self::EvenSigns) { 1 } else { 2 }
    }
}

/// A code book of entries of `D` values, and the scales of a super-block: `x ≈ d·factor·(2·s + 1)·q`.
pub(super) struct Book<const D: usize> {
    pub entries: &'static [[i8; D]],
    /// What the values of entries can be, ascending.
    pub levels: &'static [i8],
    /// Values of a sub-block.
    pub sub: usize,
    /// The largest sub-scale `s`.
    pub hi: u8,
    pub factor: f32,
    pub join: Join,
    pub lists: &'static OnceLock<Lists>,
}

/// What is found out once for a book.
pub(super) struct Lists {
    /// The entries nearest to each point of the lattice of levels, `[n_level^D, NEAR]`.
    near: Vec<u16>,
    /// The two halves of each entry, as points of the lattice of half as many values.
    halves: Vec<[u8; 2]>,
}

/// What a super-block becomes.
pub(super) struct Found {
    pub d: f16,
    /// The sub-scale of each 16 values.
    pub s: [u8; 16],
    /// The entry of each group.
    pub entry: [u16; 64],
    /// Minus signs of each 8 values.
    pub minus: [u8; 32],
    /// Whether 1 is taken off each 8 values.
    pub takes_off: [bool; 32],
}

/// What a search needs, kept from one super-block to the next.
pub(crate) struct Room {
    /// What the search is compiled for.
    level: Level,
    /// `[n_group, n_variant, NEAR]`.
    a: Vec<f32>,
    /// As `a`.
    b: Vec<f32>,
    /// `[n_group, NEAR]`.
    entry: Vec<u16>,
}

impl Room {
    pub fn new(level: Level) -> Self {
        Self { level, a: Vec::new(), b: Vec::new(), entry: Vec::new() }
    }
}

impl<const D: usize> Book<D> {
    /// The entries, sub-scales and scale of a super-block.
    pub fn search(&'static self, block: &Block<256>, room: &mut Room) -> Found {
        let n = 256 / D * NEAR;
        room.a.resize(n * self.join.n_variant(), 0.0);
        room.b.resize(n * self.join.n_variant(), 0.0);
        room.entry.resize(n, 0);
        let (mut x, mut minus) = (block.x, [0; 32]);
        if self.join.has_signs() {
            for (minus, x) in minus.iter_mut().zip(x.as_chunks_mut::<8>().0) {
                *minus = (0..8).fold(0, |bits, i| bits | u8::from(x[i] < 0.0) << i);
                *x = x.map(f32::abs);
            }
        }
        let lists = self.lists.get_or_init(|| self.lists());
        at_level!(room.level, _ => Search { book: self, lists, block, room, x, minus }.run())
    }

    fn lists(&self) -> Lists {
        let n = self.levels.len();
        let digits = |entry: &[i8; D]| entry.map(|v| self.levels.iter().take_while(|&&level| level < v).count() as i32);
        let entries: Vec<[i32; D]> = self.entries.iter().map(digits).collect();
        let mut near = Vec::with_capacity(n.pow(D as u32) * NEAR);
        for point in 0..n.pow(D as u32) {
            let point: [i32; D] = std::array::from_fn(|i| (point / n.pow(i as u32) % n) as i32);
            let distance = |entry: &[i32; D]| entry.iter().zip(point).map(|(&a, b)| (a - b) * (a - b)).sum::<i32>();
            // An entry is told by its distance, then its place.
            let mut far: Vec<u32> =
                entries.iter().enumerate().map(|(i, entry)| (distance(entry) as u32) << 16 | i as u32).collect();
            far.select_nth_unstable(NEAR - 1);
            far[..NEAR].sort_unstable();
            near.extend(far[..NEAR].iter().map(|&far| far as u16));
        }
        let half = |digits: &[i32]| digits.iter().rev().fold(0, |point, digit| point * n as i32 + digit) as u8;
        Lists { near, halves: entries.iter().map(|e| [half(&e[..D / 2]), half(&e[D / 2..])]).collect() }
    }
}

/// An entry that a group takes.
#[derive(Clone, Copy, Default)]
struct Taken {
    /// Its place in the list.
    at: usize,
    variant: usize,
    a: f32,
    b: f32,
}

/// Scale and sub-scales of a super-block.
#[derive(Clone, Copy)]
struct Scales {
    /// The error that they leave, but for a constant.
    err: f32,
    /// The scale, in units of the block, and with the book's factor: `x ≈ unit·(2·s + 1)·q`.
    unit: f32,
    s: [u8; 16],
}

impl Scales {
    #[inline(always)]
    fn of(&self, j: usize) -> f32 {
        self.unit * f32::from(2 * self.s[j] + 1)
    }
}

/// A search in a super-block.
struct Search<'a, const D: usize> {
    book: &'static Book<D>,
    lists: &'static Lists,
    block: &'a Block<256>,
    room: &'a mut Room,
    /// Values; magnitudes where there are signs.
    x: [f32; 256],
    /// Minus signs of each 8 values.
    minus: [u8; 32],
}

impl<const D: usize> Search<'_, D> {
    #[inline(always)]
    fn run(mut self) -> Found {
        let n = 256 / self.book.sub;
        let mut wanted = [0.0; 16];
        for j in 0..n {
            let plain = self.plain_scale(j);
            (j * self.n_groups()..(j + 1) * self.n_groups()).for_each(|g| self.list(g, plain));
            wanted[j] = self.scale(j, plain);
        }
        let unit = wanted.iter().copied().fold(0.0, f32::max) / f32::from(2 * self.book.hi + 1);
        let mut best = self.sub_scales(&wanted, unit);
        for wider in [0.95, 1.05] {
            let next = self.sub_scales(&wanted, wider * unit);
            if next.err < best.err {
                best = next;
            }
        }
        for _ in 0..ROUNDS {
            let next = self.sub_scales(&wanted, self.refit(&best));
            if next.err >= best.err {
                break;
            }
            best = next;
        }
        self.found(&best)
    }

    /// Groups of a sub-block.
    #[inline(always)]
    fn n_groups(&self) -> usize {
        self.book.sub / D
    }

    /// The scale that would suit a sub-block best if each value could have every level.
    #[inline(always)]
    fn plain_scale(&self, j: usize) -> f32 {
        let range = j * self.book.sub..(j + 1) * self.book.sub;
        let (x, w) = (&self.x[range.clone()], &self.block.w[range]);
        let peak = crate::act::amax(x);
        let mut best = (f32::INFINITY, 0.0);
        // The largest value on the outermost level and a little below, then further and further above.
        let mut s = 1.1 * peak / f32::from(self.book.levels[self.book.levels.len() - 1]);
        for _ in 0..12 {
            let mut lanes = [0.0; LANES];
            for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
                let mut least = [f32::INFINITY; LANES];
                for &level in self.book.levels {
                    let y = s * f32::from(level);
                    for i in 0..LANES {
                        let e = (x[i] - y) * (x[i] - y);
                        least[i] = if e < least[i] { e } else { least[i] };
                    }
                }
                (0..LANES).for_each(|i| lanes[i] += w[i] * least[i]);
            }
            let err = lanes.iter().sum::<f32>();
            if err < best.0 {
                best = (err, s);
            }
            s *= 0.91;
        }
        best.1
    }

    /// Writes the list of a group for scales about `s`: the entries nearest to the point of the lattice of levels that
    /// is nearest to its values.
    #[inline(always)]
    fn list(&mut self, g: usize, s: f32) {
        let (first, levels, join) = (g * D, self.book.levels, self.book.join);
        let x: &[f32; D] = &self.x.as_chunks().0[g];
        let w: &[f32; D] = &self.block.w.as_chunks().0[g];
        let mut point = 0;
        for x in x.iter().rev() {
            let middle = |two: &[i8]| 0.5 * s * (f32::from(two[0]) + f32::from(two[1]));
            point = point * levels.len() + levels.windows(2).filter(|two| *x > middle(two)).count();
        }
        let near: &[u16; NEAR] = &self.lists.near.as_chunks().0[point];
        self.room.entry.as_chunks_mut().0[g] = *near;
        let at = g * join.n_variant() * NEAR;
        let (a, b) = (&mut self.room.a[at..], &mut self.room.b[at..]);
        let halves = near.map(|entry| self.lists.halves[usize::from(entry)]);
        match join {
            Join::Signs | Join::EvenSigns => {
                let sums = Halves::new::<Signs, D>(levels, x, w);
                let wrong = if join == Join::EvenSigns && is_odd(self.minus[first / 8]) { 2.0 } else { 0.0 };
                for (k, (a, b)) in a[..NEAR].iter_mut().zip(&mut b[..NEAR]).enumerate() {
                    let sum = sums.of::<Signs>(halves[k]);
                    (*a, *b) = (sum[0] - wrong * sum[2], sum[1]);
                }
            }
            Join::EvenSignsOfTwo => {
                let sums = Halves::new::<Signs, D>(levels, x, w);
                let (a, b) = (&mut a[..2 * NEAR], &mut b[..2 * NEAR]);
                for k in 0..NEAR {
                    let sum = sums.of::<Signs>(halves[k]);
                    (a[k], b[k], a[NEAR + k], b[NEAR + k]) = (sum[0], sum[1], sum[0] - 2.0 * sum[2], sum[1]);
                }
            }
            Join::OffsetOfAll | Join::OffsetOfEach => {
                let sums = Halves::new::<Offsets, D>(levels, x, w);
                let (a, b) = (&mut a[..2 * NEAR], &mut b[..2 * NEAR]);
                for k in 0..NEAR {
                    (a[k], b[k], a[NEAR + k], b[NEAR + k]) = sums.of::<Offsets>(halves[k]).into();
                }
            }
        }
    }

    /// The best scale of a sub-block about `s`, for its lists.
    #[inline(always)]
    fn scale(&self, j: usize, s: f32) -> f32 {
        let mut best = (f32::INFINITY, s);
        for step in [1.0, 0.86, 0.93, 1.07, 1.14] {
            let err = self.error(j, step * s);
            if err < best.0 {
                best = (err, step * s);
            }
        }
        best.1
    }

    /// The sub-scales near the wanted scales that are best with a given unit, rounded as the format has it.
    #[inline(always)]
    fn sub_scales(&self, wanted: &[f32; 16], unit: f32) -> Scales {
        let unit = self.block.half(unit / self.book.factor).1 * self.book.factor;
        let mut found = Scales { err: 0.0, unit, s: [0; 16] };
        for j in 0..256 / self.book.sub {
            let near = (0.5 * (over(wanted[j], unit) - 1.0)).round();
            let mut least = f32::INFINITY;
            for s in [near, near - 1.0, near + 1.0].map(|s| s.max(0.0).min(f32::from(self.book.hi)) as u8) {
                let err = self.error(j, unit * f32::from(2 * s + 1));
                if err < least {
                    (least, found.s[j]) = (err, s);
                }
            }
            found.err += least;
        }
        found
    }

    /// The unit of least squares for the entries that are best with given scales.
    #[inline(always)]
    fn refit(&self, scales: &Scales) -> f32 {
        let (mut xa, mut aa) = (0.0, 0.0);
        for j in 0..256 / self.book.sub {
            let s = f32::from(2 * scales.s[j] + 1);
            for taken in &self.take(j, scales.of(j))[..self.n_groups()] {
                xa += s * taken.a;
                aa += s * s * taken.b;
            }
        }
        over(xa, aa).max(0.0)
    }

    /// What the super-block becomes with these scales.
    #[inline(always)]
    fn found(&self, scales: &Scales) -> Found {
        let len = self.book.sub;
        let mut found = Found {
            d: f16::ZERO,
            s: std::array::from_fn(|g| scales.s[16 * g / len]),
            entry: [0; 64],
            minus: self.minus,
            takes_off: [false; 32],
        };
        let mut xy = 0.0;
        for j in 0..256 / len {
            for (k, taken) in self.take(j, scales.of(j))[..self.n_groups()].iter().enumerate() {
                let g = j * self.n_groups() + k;
                let entry = self.room.entry[g * NEAR + taken.at];
                found.entry[g] = entry;
                xy += scales.of(j) * taken.a;
                let (eight, is_second) = (g * D / 8, taken.variant == 1);
                if !self.book.join.has_signs() {
                    found.takes_off[eight] = is_second;
                } else if is_second || self.book.join == Join::EvenSigns && is_odd(self.minus[eight]) {
                    let q = &self.book.entries[usize::from(entry)];
                    let costs: [f32; D] =
                        std::array::from_fn(|i| self.block.w[g * D + i] * self.x[g * D + i] * f32::from(q[i]));
                    let wrong = (1..D).fold(0, |least, i| if costs[i] < costs[least] { i } else { least });
                    found.minus[eight] ^= 1 << (g * D % 8 + wrong);
                }
            }
        }
        let in_d = scales.unit / self.book.factor;
        found.d = f16::from_f32(self.block.half(in_d * self.block.gain_by(xy)).0);
        found
    }

    /// The least error of a sub-block at a scale, but for a constant.
    #[inline(always)]
    fn error(&self, j: usize, s: f32) -> f32 {
        let groups = j * self.n_groups()..(j + 1) * self.n_groups();
        let least = |g: usize, variant: usize| {
            let (a, b) = self.costs(g, variant);
            least(a, b, s)
        };
        let sum: f32 = match self.book.join {
            Join::Signs | Join::EvenSigns => groups.map(|g| least(g, 0)).sum(),
            Join::EvenSignsOfTwo => groups
                .step_by(2)
                .map(|g| match is_odd(self.minus[g / 2]) {
                    true => (least(g, 0) + least(g + 1, 1)).min(least(g, 1) + least(g + 1, 0)),
                    false => least(g, 0) + least(g + 1, 0),
                })
                .sum(),
            Join::OffsetOfAll => {
                let sum = |variant: usize| groups.clone().map(|g| least(g, variant)).sum::<f32>();
                sum(0).min(sum(1))
            }
            Join::OffsetOfEach => groups.map(|g| least(g, 0).min(least(g, 1))).sum(),
        };
        sum * s
    }

    /// What the groups of a sub-block take at a scale.
    #[inline(always)]
    fn take(&self, j: usize, s: f32) -> [Taken; 8] {
        let (first, n) = (j * self.n_groups(), self.n_groups());
        let pick = |g: usize, variant: usize| {
            let (a, b) = self.costs(g, variant);
            let at = pick(a, b, s);
            Taken { at, variant, a: a[at], b: b[at] }
        };
        let cost = |taken: &[Taken]| taken.iter().map(|taken| s * taken.b - 2.0 * taken.a).sum::<f32>();
        let mut taken = [Taken::default(); 8];
        let of =
            |variant: usize| std::array::from_fn(|k| if k < n { pick(first + k, variant) } else { Taken::default() });
        match self.book.join {
            Join::Signs | Join::EvenSigns => taken = of(0),
            Join::EvenSignsOfTwo => {
                for (two, g) in taken[..n].as_chunks_mut::<2>().0.iter_mut().zip((first..).step_by(2)) {
                    *two = [pick(g, 0), pick(g + 1, 0)];
                    if is_odd(self.minus[g / 2]) {
                        let (last, first) = ([two[0], pick(g + 1, 1)], [pick(g, 1), two[1]]);
                        *two = if cost(&last) < cost(&first) { last } else { first };
                    }
                }
            }
            Join::OffsetOfAll => {
                let (plus, minus): ([Taken; 8], [Taken; 8]) = (of(0), of(1));
                taken = if cost(&minus[..n]) < cost(&plus[..n]) { minus } else { plus };
            }
            Join::OffsetOfEach => {
                for (taken, g) in taken[..n].iter_mut().zip(first..) {
                    let (plus, minus) = (pick(g, 0), pick(g, 1));
                    *taken = if cost(&[minus]) < cost(&[plus]) { minus } else { plus };
                }
            }
        }
        taken
    }

    /// The list of a group, `a` and `b`.
    #[inline(always)]
    fn costs(&self, g: usize, variant: usize) -> (&[f32; NEAR], &[f32; NEAR]) {
        let at = g * self.book.join.n_variant() + variant;
        (&self.room.a.as_chunks().0[at], &self.room.b.as_chunks().0[at])
    }
}

/// What single values add to the sums of entries.
trait Terms {
    /// Sums of no value.
    const NONE: [f32; 4];
    /// What a value `x` of weight `w` adds where an entry has `q`.
    fn of(w: f32, x: f32, q: f32) -> [f32; 4];
    fn join(a: [f32; 4], b: [f32; 4]) -> [f32; 4];
}

/// `a`, `b`, and the least part of `a`, which a wrong sign takes off twice.
struct Signs;

impl Terms for Signs {
    const NONE: [f32; 4] = [0.0, 0.0, f32::INFINITY, 0.0];

    #[inline(always)]
    fn of(w: f32, x: f32, q: f32) -> [f32; 4] {
        [w * x * q, w * q * q, w * x * q, 0.0]
    }

    #[inline(always)]
    fn join(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        [a[0] + b[0], a[1] + b[1], if a[2] < b[2] { a[2] } else { b[2] }, 0.0]
    }
}

/// `a` and `b` of the entry and 1, then of the entry less 1.
struct Offsets;

impl Terms for Offsets {
    const NONE: [f32; 4] = [0.0; 4];

    #[inline(always)]
    fn of(w: f32, x: f32, q: f32) -> [f32; 4] {
        let (plus, minus) = (q + 1.0, q - 1.0);
        [w * x * plus, w * plus * plus, w * x * minus, w * minus * minus]
    }

    #[inline(always)]
    fn join(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
}

/// Sums over each half of a group, for every point of the lattice that the half of an entry can be.
struct Halves([[[f32; 4]; HALF]; 2]);

impl Halves {
    #[inline(always)]
    fn new<T: Terms, const D: usize>(levels: &[i8], x: &[f32; D], w: &[f32; D]) -> Self {
        let mut halves = [[T::NONE; HALF]; 2];
        for (h, half) in halves.iter_mut().enumerate() {
            let mut n = 1;
            for i in h * D / 2..(h + 1) * D / 2 {
                // From above, for level 0 takes the place of what there is.
                for (l, &level) in levels.iter().enumerate().rev() {
                    let term = T::of(w[i], x[i], f32::from(level));
                    for e in 0..n {
                        half[l * n + e] = T::join(half[e], term);
                    }
                }
                n *= levels.len();
            }
        }
        Self(halves)
    }

    #[inline(always)]
    fn of<T: Terms>(&self, [low, high]: [u8; 2]) -> [f32; 4] {
        T::join(self.0[0][usize::from(low)], self.0[1][usize::from(high)])
    }
}

#[inline(always)]
fn is_odd(minus: u8) -> bool {
    minus.count_ones() % 2 == 1
}

/// The least `s·b - 2·a`.
#[inline(always)]
fn least(a: &[f32; NEAR], b: &[f32; NEAR], s: f32) -> f32 {
    let mut lanes = [f32::INFINITY; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            let cost = s * b[i] - 2.0 * a[i];
            lanes[i] = if cost < lanes[i] { cost } else { lanes[i] };
        }
    }
    lanes.iter().copied().fold(f32::INFINITY, |least, v| if v < least { v } else { least })
}

/// The place of the least `s·b - 2·a`, the first of equals.
#[inline(always)]
fn pick(a: &[f32; NEAR], b: &[f32; NEAR], s: f32) -> usize {
    let wanted = least(a, b, s);
    a.iter().zip(b).position(|(a, b)| s * b - 2.0 * a <= wanted).unwrap_or(0)
}
