//! Code books of IQ1, IQ2 and IQ3, read from `kernels/quant/grids.h` while this crate is compiled: kernels of GPUs and
//! this crate have the same numbers. An entry holds indices of values, the first in the low bits.

/// The header (a link in this folder, so that a package holds it).
const HEADER: &[u8] = include_bytes!("grids.h");

pub(super) const IQ2_XXS: [u16; 256] = book(b" iq2_xxs_codes[");
pub(super) const IQ2_XS: [u16; 512] = book(b" iq2_xs_codes[");
pub(super) const IQ2_S: [u16; 1024] = book(b" iq2_s_codes[");
pub(super) const IQ1: [u16; 2048] = book(b" iq1_codes[");
pub(super) const IQ3_XXS: [u16; 256] = book(b" iq3_xxs_codes[");
pub(super) const IQ3_S: [u16; 512] = book(b" iq3_s_codes[");

/// Reads the table whose declaration has `name`: `N` numbers of four hexadecimal digits between braces.
const fn book<const N: usize>(name: &[u8]) -> [u16; N] {
    let mut at = 0;
    while !starts_with(at, name) {
        at += 1;
    }
    while HEADER[at] != b'{' {
        at += 1;
    }
    let (mut entries, mut n) = ([0; N], 0);
    while HEADER[at] != b'}' {
        if HEADER[at] != b'x' {
            at += 1;
            continue;
        }
        let mut digit = 1;
        while digit <= 4 {
            entries[n] = entries[n] << 4 | hex(HEADER[at + digit]);
            digit += 1;
        }
        (at, n) = (at + 5, n + 1);
    }
    assert!(n == N, "a code book of another length");
    entries
}

const fn starts_with(at: usize, name: &[u8]) -> bool {
    let mut i = 0;
    while i < name.len() && HEADER[at + i] == name[i] {
        i += 1;
    }
    i == name.len()
}

const fn hex(digit: u8) -> u16 {
    match digit {
        b'0'..=b'9' => (digit - b'0') as u16,
        b'a'..=b'f' => (digit - b'a' + 10) as u16,
        _ => panic!("no hexadecimal digit"),
    }
}
