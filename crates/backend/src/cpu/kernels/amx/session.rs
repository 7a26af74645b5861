//! The tiles of a thread: their shapes, and the instructions, which stable Rust knows in assembly only. The compiler
//! itself uses no tiles.

use std::arch::asm;
use std::marker::PhantomData;

use quant::act::ActKind;

/// Tiles that are set up on this thread, until it is dropped: then they are empty, and switching threads saves nothing
/// of them. Setting them up takes some 60 ns, so that a session spans the rows of a call.
pub(in super::super) struct Session {
    kind: ActKind,
    /// Tiles belong to a thread.
    _thread: PhantomData<*const ()>,
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// All tiles have 16 rows of 64 bytes, but those of `A` (4 and 5) have `bytes`, and those of `B` (6 and 7) a row
    /// for every four of them.
    const fn new(bytes: u16) -> Config {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut i = 0;
        while i < 8 {
            row_bytes[i] = if i == 4 || i == 5 { bytes } else { 64 };
            rows[i] = if i >= 6 { (bytes / 4) as u8 } else { 16 };
            i += 1;
        }
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

static FULL: Config = Config::new(64);
static HALF: Config = Config::new(32);

impl Session {
    /// Sets the tiles up for products of weights with activations of `kind`.
    ///
    /// # Safety
    /// The machine has [`crate::cpu::Isa::Amx`].
    pub unsafe fn begin(kind: ActKind) -> Session {
        let config = if kind == ActKind::Block256 { &FULL } else { &HALF };
        // SAFETY: the caller's promise; the configuration is valid and aligned.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
        Session { kind, _thread: PhantomData }
    }

    /// The kind of activations that it is for.
    pub fn kind(&self) -> ActKind {
        self.kind
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: `begin` was on this thread, as no session is `Send`.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

/// One instruction on tiles: `zero`, `load` of rows that are a stride apart, `store` of rows of 64 bytes, and `add`,
/// which is `C += A·B`, where the two letters say whether the bytes of `A` and of `B` have a sign (`s`) or none (`u`).
macro_rules! tile {
    (zero $($t:literal)*) => {
        std::arch::asm!($(concat!("tilezero tmm", $t),)* options(nostack, nomem, preserves_flags))
    };
    (load $t:literal, $p:expr, $stride:literal) => {
        std::arch::asm!(
            concat!("tileloadd tmm", $t, ", [{0} + {1}*1]"),
            in(reg) $p, in(reg) $stride as usize,
            options(nostack, readonly, preserves_flags)
        )
    };
    (store $t:literal, $p:expr) => {
        std::arch::asm!(
            concat!("tilestored [{0} + {1}*1], tmm", $t),
            in(reg) $p, in(reg) 64usize,
            options(nostack, preserves_flags)
        )
    };
    (add $sign:literal $c:literal, $a:literal, $b:literal) => {
        std::arch::asm!(
            concat!("tdpb", $sign, "d tmm", $c, ", tmm", $a, ", tmm", $b),
            options(nostack, nomem, preserves_flags)
        )
    };
}
pub(super) use tile;
