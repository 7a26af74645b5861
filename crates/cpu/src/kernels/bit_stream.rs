//! How shuffles cut values of 2, 3, 5 and 6 bits out of the stream of a plane ([`quant::types::planar`]), 32 at a time.
//!
//! Two neighbours lie in two bytes. A byte shuffle moves these to the 16-bit lane of the pair, and a shift by lane
//! moves the pair to one place in all lanes. The upper sixteen values are loaded from [`BitStream::upper`] on.

/// The constants of the shuffle and the shift, `[half]`.
pub(super) struct BitStream {
    /// Byte of the load for each byte of the lanes; 0x80 is out of range and becomes zero.
    pub bytes: [[u8; 16]; 2],
    /// Of each lane: the factor that shifts it left (`left`), or the bits by which it is shifted, negative
    /// to the right (`right`).
    pub shift: [[i16; 8]; 2],
}

impl BitStream {
    /// Byte from which the upper half is loaded; both halves have all their bytes in the load.
    pub const fn upper(bits: usize) -> usize {
        match bits {
            2 => 0,
            6 => 8,
            _ => 4,
        }
    }

    /// Factors that move the pairs to bit `low` of their lanes.
    #[cfg(target_arch = "x86_64")]
    pub const fn left(bits: usize, low: usize) -> Self {
        let mut s = Self::new(bits);
        let mut lane = 0;
        while lane < 16 {
            let shift = &mut s.shift[lane / 8][lane % 8];
            *shift = 1 << (low as i16 + *shift);
            lane += 1;
        }
        s
    }

    /// Shifts that move the pairs to bit 0 of their lanes.
    #[cfg(target_arch = "aarch64")]
    pub const fn right(bits: usize) -> Self {
        Self::new(bits)
    }

    const fn new(bits: usize) -> Self {
        let mut s = Self { bytes: [[0x80; 16]; 2], shift: [[0; 8]; 2] };
        let mut lane = 0;
        while lane < 16 {
            let (bit, half, at) = (2 * bits * lane, lane / 8, lane % 8);
            let byte = bit / 8 - half * Self::upper(bits);
            s.bytes[half][2 * at] = byte as u8;
            if bit % 8 + 2 * bits > 8 {
                s.bytes[half][2 * at + 1] = byte as u8 + 1;
            }
            s.shift[half][at] = -((bit % 8) as i16);
            lane += 1;
        }
        s
    }
}
