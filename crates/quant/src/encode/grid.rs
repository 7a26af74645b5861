//! Encoders of the types with code books and of the ternary ones: what a search finds, as bytes.

use std::sync::OnceLock;

use super::block::{Block, over};
use super::book::{Book, Join, Lists, Room};
use super::search::sums_of;
use crate::types::grid::{IQ1_LEVELS, IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS};
use crate::types::{grid, put_f16};

/// The lists of code books: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1.
static LISTS: [OnceLock<Lists>; 6] = [const { OnceLock::new() }; 6];

static IQ2_XXS: Book<8> = Book {
    entries: &grid::IQ2_XXS,
    levels: IQ2_LEVELS.split_at(3).0,
    sub: 32,
    hi: 15,
    factor: 0.125,
    join: Join::EvenSigns,
    lists: &LISTS[0],
};

static IQ2_XS: Book<8> = Book {
    entries: &grid::IQ2_XS,
    levels: IQ2_LEVELS.split_at(3).0,
    sub: 16,
    hi: 15,
    factor: 0.125,
    join: Join::EvenSigns,
    lists: &LISTS[1],
};

static IQ2_S: Book<8> = Book {
    entries: &grid::IQ2_S,
    levels: IQ2_LEVELS.split_at(3).0,
    sub: 16,
    hi: 15,
    factor: 0.125,
    join: Join::Signs,
    lists: &LISTS[2],
};

static IQ3_XXS: Book<4> = Book {
    entries: &grid::IQ3_XXS,
    levels: &IQ3_XXS_LEVELS,
    sub: 32,
    hi: 15,
    factor: 0.25,
    join: Join::EvenSignsOfTwo,
    lists: &LISTS[3],
};

static IQ3_S: Book<4> = Book {
    entries: &grid::IQ3_S,
    levels: &IQ3_S_LEVELS,
    sub: 32,
    hi: 15,
    factor: 1.0,
    join: Join::Signs,
    lists: &LISTS[4],
};

static IQ1_S: Book<8> = Book {
    entries: &grid::IQ1,
    levels: IQ1_LEVELS.split_at(3).0,
    sub: 32,
    hi: 7,
    factor: 0.125,
    join: Join::OffsetOfAll,
    lists: &LISTS[5],
};

static IQ1_M: Book<8> = Book {
    entries: &grid::IQ1,
    levels: IQ1_LEVELS.split_at(3).0,
    sub: 16,
    hi: 7,
    factor: 0.125,
    join: Join::OffsetOfEach,
    lists: &LISTS[5],
};

pub(crate) fn iq2_xxs(x: &Block<256>, room: &mut Room, b: &mut [u8; 66]) {
    let found = IQ2_XXS.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    for g in 0..8 {
        let mut bits = u32::from(found.s[2 * g]) << 28;
        for k in 0..4 {
            b[2 + 8 * g + k] = found.entry[4 * g + k] as u8;
            bits |= u32::from(found.minus[4 * g + k] & 127) << (7 * k);
        }
        b[6 + 8 * g..10 + 8 * g].copy_from_slice(&bits.to_le_bytes());
    }
}

pub(crate) fn iq2_xs(x: &Block<256>, room: &mut Room, b: &mut [u8; 74]) {
    let found = IQ2_XS.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    for i in 0..32 {
        let bits = found.entry[i] | u16::from(found.minus[i] & 127) << 9;
        b[2 + 2 * i..4 + 2 * i].copy_from_slice(&bits.to_le_bytes());
    }
    (0..8).for_each(|g| b[66 + g] = found.s[2 * g] | found.s[2 * g + 1] << 4);
}

pub(crate) fn iq2_s(x: &Block<256>, room: &mut Room, b: &mut [u8; 82]) {
    let found = IQ2_S.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    b[66..74].fill(0);
    for i in 0..32 {
        let entry = found.entry[i];
        (b[2 + i], b[34 + i]) = (entry as u8, found.minus[i]);
        b[66 + i / 4] |= (entry >> 8 << (2 * (i % 4))) as u8;
    }
    (0..8).for_each(|g| b[74 + g] = found.s[2 * g] | found.s[2 * g + 1] << 4);
}

pub(crate) fn iq3_xxs(x: &Block<256>, room: &mut Room, b: &mut [u8; 98]) {
    let found = IQ3_XXS.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    (0..64).for_each(|i| b[2 + i] = found.entry[i] as u8);
    for g in 0..8 {
        let signs = (0..4).fold(0, |bits, k| bits | u32::from(found.minus[4 * g + k] & 127) << (7 * k));
        let bits = signs | u32::from(found.s[2 * g]) << 28;
        b[66 + 4 * g..70 + 4 * g].copy_from_slice(&bits.to_le_bytes());
    }
}

pub(crate) fn iq3_s(x: &Block<256>, room: &mut Room, b: &mut [u8; 110]) {
    let found = IQ3_S.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    b[66..74].fill(0);
    for (i, &entry) in found.entry.iter().enumerate() {
        b[2 + i] = entry as u8;
        b[66 + i / 8] |= ((entry >> 8) << (i % 8)) as u8;
    }
    b[74..106].copy_from_slice(&found.minus);
    (0..4).for_each(|g| b[106 + g] = found.s[4 * g] | found.s[4 * g + 2] << 4);
}

pub(crate) fn iq1_s(x: &Block<256>, room: &mut Room, b: &mut [u8; 50]) {
    let found = IQ1_S.search(x, room);
    b[..2].copy_from_slice(&found.d.to_le_bytes());
    for g in 0..8 {
        let mut high = u16::from(found.s[2 * g]) << 12 | u16::from(found.takes_off[4 * g]) << 15;
        for k in 0..4 {
            let entry = found.entry[4 * g + k];
            b[2 + 4 * g + k] = entry as u8;
            high |= (entry >> 8) << (3 * k);
        }
        b[34 + 2 * g..36 + 2 * g].copy_from_slice(&high.to_le_bytes());
    }
}

pub(crate) fn iq1_m(x: &Block<256>, room: &mut Room, b: &mut [u8; 56]) {
    let found = IQ1_M.search(x, room);
    b[32..48].fill(0);
    for i in 0..32 {
        let entry = found.entry[i];
        b[i] = entry as u8;
        b[32 + i / 2] |= ((entry >> 8) as u8 | u8::from(found.takes_off[i]) << 3) << (4 * (i % 2));
    }
    for i in 0..4 {
        let s = (0..4).fold(0, |bits, k| bits | u16::from(found.s[4 * i + k]) << (3 * k));
        let bits = s | (found.d.to_bits() >> (4 * i)) << 12;
        b[48 + 2 * i..50 + 2 * i].copy_from_slice(&bits.to_le_bytes());
    }
}

/// Digits 0, 1, 2 of 256 values, and their scale.
///
/// At a scale `d` values beyond `d / 2` take the outer digits, and the best scale for these is their mean. From all
/// values that are not zero (which is right for weights that have three values) or from most of them, whichever is
/// better, digits and scale are chosen anew for each other.
fn digits(b: &Block<256>) -> (f32, [u8; 256]) {
    const REPEATS: usize = 4;
    let size = b.x.map(f32::abs);
    // `Σ w·|x|` and `Σ w` of the values beyond a threshold. Masks, as branches on weights are guessed wrong.
    let beyond = |threshold: f32| {
        sums_of(&size, &b.w, |x, w| {
            let w = f32::from_bits(w.to_bits() & u32::from(x > threshold).wrapping_neg());
            [w * x, w]
        })
    };
    // What is gained of `Σ w·x²`, and the mean.
    let attempt = |threshold: f32| {
        let [sum, n] = beyond(threshold);
        (over(sum, n) * sum, over(sum, n))
    };
    let all = attempt(0.0);
    let mut best = attempt(0.75 * all.1);
    if all.0 >= best.0 {
        best = all;
    }
    for _ in 0..REPEATS {
        let next = attempt(0.5 * best.1);
        if next.0 <= best.0 {
            break;
        }
        best = next;
    }
    let in_d = b.half(best.1).1;
    let (threshold, mut q) = (0.5 * in_d, [0; 256]);
    for (q, x) in q.iter_mut().zip(&b.x) {
        *q = 1 + u8::from(*x > threshold) - u8::from(*x < -threshold);
    }
    let gain = b.gain_by(in_d * beyond(threshold)[0]);
    (b.half(in_d * gain).0, q)
}

pub(crate) fn tq1_0(x: &Block<256>, _: &mut Room, b: &mut [u8; 54]) {
    /// Bytes of five digits, or of four and a 0: the `i`th has those at `i`, `i + N`, ..
    fn put<const N: usize>(q: &[[u8; N]], b: &mut [u8]) {
        for (i, b) in b[..N].iter_mut().enumerate() {
            let number = (0..5).fold(0, |a, n| 3 * a + q.get(n).map_or(0, |q| u16::from(q[i])));
            // A fraction of 243 as one of 256, rounded up, so that its digits come out of products by three.
            *b = (number * 256).div_ceil(243) as u8;
        }
    }
    let (d, q) = digits(x);
    put::<32>(q[..160].as_chunks().0, &mut b[..32]);
    put::<16>(q[160..240].as_chunks().0, &mut b[32..48]);
    put::<4>(q[240..].as_chunks().0, &mut b[48..52]);
    put_f16(b, 52, d);
}

pub(crate) fn tq2_0(x: &Block<256>, _: &mut Room, b: &mut [u8; 66]) {
    let (d, q) = digits(x);
    for (b, q) in b[..64].as_chunks_mut::<32>().0.iter_mut().zip(q.as_chunks::<128>().0) {
        let q: &[[u8; 32]] = q.as_chunks().0;
        for (i, b) in b.iter_mut().enumerate() {
            *b = q[0][i] | q[1][i] << 2 | q[2][i] << 4 | q[3][i] << 6;
        }
    }
    put_f16(b, 64, d);
}

#[cfg(test)]
mod tests {
    use crate::types::grid::signs;

    #[test]
    fn signs_come_back() {
        for seven in 0..128 {
            assert_eq!(signs(seven).count_ones() % 2, 0);
            assert_eq!(signs(seven) & 127, seven);
        }
    }
}
