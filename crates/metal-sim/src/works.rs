//! What kernels besides products cost, counted by the simulator, on the shapes on which `tools/metal_others.py` counts
//! other engines' kernels: the second table of `kernels/metal/README.md`.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use backend::metal::gpu::{Cmd, Gpu, List, Span, Unit, Use};

use crate::clang::Clang;
use crate::costs::{head, row};
use crate::{Count, Options, Sim};

/// Limit of a kernel.
const LIMIT: Duration = Duration::from_secs(60);

/// Heads of queries, those that share a head of keys, and their size.
const HEADS: u32 = 8;
const GROUP: u32 = 4;
const D: u32 = 128;
/// Keys that a token sees.
const KEYS: u32 = 257;
/// Tokens of a prompt, of which the last one sees all keys.
const PROMPT: u32 = 64;
/// Heads of a delta rule, of keys and of values.
const V_HEADS: u32 = 4;
/// Numbers of a row that is normed.
const ROW: u32 = 1024;

/// What is bound to a slot.
enum Bound {
    Nothing,
    Params(Vec<u32>),
    Read(Vec<u32>),
    /// Floats of 0, so many.
    Zeros(u32),
    Updated(u32),
    Written(u32),
}

/// A kernel with what it is given.
struct Work {
    what: &'static str,
    file: &'static str,
    kernel: &'static str,
    defines: Vec<(&'static str, u32)>,
    /// Type of weights.
    weight: Option<&'static str>,
    slots: Vec<Bound>,
    groups: [u32; 3],
    threads: u32,
    /// Multiply-adds, or numbers of a norm.
    all: u64,
}

/// A chunk of one sequence, as `chunk.h` has it, in slot 0 of states.
fn chunk(len: u32, pos: u32) -> Bound {
    Bound::Read(vec![0, 0, 0, 0, len, pos, 0])
}

/// Attention of the last `n` of all positions.
fn attention(what: &'static str, n: u32) -> Work {
    use Bound::{Nothing, Params, Read, Written, Zeros};
    let (n_kv, pages) = (HEADS / GROUP, KEYS.div_ceil(32));
    // Halves: two to a float's place.
    let cache = || Zeros(pages * n_kv * 32 * D / 2);
    let params = Params(vec![HEADS, n_kv, 0, 0, 1f32.to_bits(), 0]);
    let is_token = n == 1;
    // Of a token its position and its chunk; a tile asks the chunk.
    let [position, chunk_of] = [KEYS - 1, 0].map(|x| if is_token { Read(vec![x]) } else { Nothing });
    let mut defines = vec![("D_K", D), ("D_V", D), ("KV_F16", 1), ("V_IN_K", 0), ("SINKS", 0)];
    defines.push(if is_token { ("SPLIT", 0) } else { ("ROWS", 32) });
    let (q, out) = (Zeros(n * HEADS * D), Written(n * HEADS * D));
    let table = Read((0..pages).collect());
    let slots = vec![q, cache(), cache(), out, params, position, chunk_of, chunk(n, KEYS - n), table];
    let seen: u32 = (KEYS - n + 1..=KEYS).sum();
    Work {
        what,
        file: if is_token { "attention.metal" } else { "attention_tiles.metal" },
        kernel: if is_token { "attention" } else { "attention_tiles" },
        defines,
        weight: None,
        slots,
        groups: if is_token { [HEADS, 1, 1] } else { [(n * GROUP).div_ceil(32), n_kv, 1] },
        threads: if is_token { 64 } else { 128 },
        all: u64::from(2 * HEADS * D * seen),
    }
}

/// A delta rule over `n` positions behind others, position by position or many at a time.
fn delta(what: &'static str, n: u32, is_by_tile: bool) -> Work {
    use Bound::{Params, Updated, Written, Zeros};
    let row = n * V_HEADS * D;
    let gates = || Zeros(n * V_HEADS);
    let state = Updated(V_HEADS * D * D);
    let params = Params(vec![V_HEADS, V_HEADS, D, 0]);
    let (width, simdgroups) = if is_by_tile { (16, 8) } else { (4, 2) };
    let columns = if is_by_tile { ("BLOCKS", 2) } else { ("FOURS", 1) };
    Work {
        what,
        file: if is_by_tile { "delta_chunks.metal" } else { "delta_net.metal" },
        kernel: if is_by_tile { "delta_chunks" } else { "delta_net" },
        defines: vec![("D_K", D), columns, ("SIMDGROUPS", simdgroups), ("NORM", 0)],
        weight: None,
        slots: vec![Zeros(row), Zeros(row), Zeros(row), gates(), gates(), state, Written(row), params, chunk(n, 32)],
        groups: [D / (width * simdgroups), V_HEADS, 1],
        threads: 32 * simdgroups,
        all: u64::from(3 * row * D),
    }
}

/// Products with 32 pairs of a token and a slot of each of two experts, of which every token has both; `planes` are the
/// bytes of a row of 512 weights in each plane.
fn experts(what: &'static str, weight: &'static str, planes: &[u32]) -> Work {
    use Bound::{Nothing, Params, Read, Written, Zeros};
    let [n, k, tokens] = [64, 512, 32];
    let order = (0..2).flat_map(|expert| (0..tokens).map(move |token| 2 * token + expert)).collect();
    // An expert, its first pair, how many.
    let tiles = vec![0, 0, tokens, 1, tokens, tokens];
    let mut slots: Vec<Bound> = planes.iter().map(|bytes| Zeros(2 * n * bytes / 4)).collect();
    slots.resize_with(6, || Nothing);
    slots.extend([Zeros(tokens * k), Read(order), Read(tiles), Written(2 * tokens * n)]);
    slots.push(Params(vec![n, k, 2, 0, 0, 0]));
    let mut defines = vec![("PLANES", planes.len() as u32), ("GATED", 0), ("BIAS", 0), ("ACT", 0)];
    if weight == "affine" {
        defines.extend([("AFFINE_BITS", 4), ("AFFINE_GROUP", 64), ("AFFINE_SCALE", 0)]);
    }
    Work {
        what,
        file: "expert_tiles.metal",
        kernel: "expert_tiles",
        defines,
        weight: Some(weight),
        slots,
        groups: [1, 2, 1],
        threads: 128,
        all: u64::from(2 * n * k * tokens),
    }
}

fn norm() -> Work {
    use Bound::{Params, Written, Zeros};
    Work {
        what: "rms_norm, token",
        file: "rms_norm.metal",
        kernel: "rms_norm",
        defines: vec![("RESIDUAL", 0)],
        weight: None,
        slots: vec![Zeros(ROW), Zeros(ROW), Written(ROW), Params(vec![ROW, 1e-5f32.to_bits()])],
        groups: [1; 3],
        threads: 64,
        all: u64::from(ROW),
    }
}

/// The table, with a row for each kernel.
///
/// # Errors
/// Where there is no clang, or where a kernel fails.
pub fn table() -> Result<String> {
    let mut out = head(&["work"]);
    for work in [
        attention("attention, token", 1),
        attention("attention, prompt", PROMPT),
        experts("32 pairs of an expert, Q8_0", "q8_0", &[544]),
        experts("32 pairs of an expert, Q4_0", "q4_0", &[288]),
        experts("32 pairs of an expert, MXFP4", "mxfp4", &[272]),
        experts("32 pairs of an expert, Q4_K", "q4_k", &[288]),
        experts("32 pairs of an expert, Q6_K", "q6_k", &[420]),
        experts("32 pairs of an expert, BF16", "bf16", &[1024]),
        experts("32 pairs of an expert, MLX 4 bits", "affine", &[256, 16, 16]),
        delta("delta_net, token", 1, false),
        delta("delta_net, prompt, position by position", PROMPT, false),
        delta("delta_net, prompt", PROMPT, true),
        norm(),
    ] {
        let count = count(&work).context(work.what)?;
        let _ = writeln!(out, "| {} {}", work.what, row(&count, work.all));
    }
    Ok(out)
}

fn count(work: &Work) -> Result<Count> {
    let mut sim = Sim::new(Options { is_counting: true, ..Options::default() })?;
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let mut source = String::from("#include <metal_stdlib>\nusing namespace metal;\n");
    for (name, value) in &work.defines {
        let _ = writeln!(source, "#define {name} {value}");
    }
    if let Some(weight) = work.weight {
        let _ = writeln!(source, "#define WEIGHT {weight}\n#define WEIGHT_HEADER \"quant/{weight}.h\"");
    }
    source += &std::fs::read_to_string(kernels.join("metal").join(work.file))?;
    let source = Clang::find()?.preprocess(&source, &[kernels])?;
    let pipe = sim.build(&[Unit { name: work.what.into(), source, kernel: work.kernel }])?[0];
    let mut list = List::default();
    list.cmds.push(Cmd::Pipe(pipe));
    for (slot, bound) in (0..).zip(&work.slots) {
        let (bytes, used) = match bound {
            Bound::Nothing => continue,
            Bound::Params(words) => {
                list.params(slot, words);
                continue;
            }
            Bound::Read(words) => (words.iter().flat_map(|word| word.to_le_bytes()).collect(), Use::Read),
            Bound::Zeros(n) => (vec![0u8; 4 * *n as usize], Use::Read),
            Bound::Updated(n) => (vec![0; 4 * *n as usize], Use::Update),
            Bound::Written(n) => (vec![0; 4 * *n as usize], Use::Write),
        };
        let span = Span { buf: sim.alloc(bytes.len() as u64, "a slot")?, at: 0, len: bytes.len() as u64 };
        if used != Use::Write {
            sim.write(span, &bytes)?;
        }
        list.cmds.push(Cmd::Bind { slot, span, used });
    }
    list.cmds.push(Cmd::Groups { grid: work.groups, threads: work.threads });
    let ticket = sim.submit(&list)?;
    sim.wait(ticket, LIMIT)?;
    Ok(sim.count(pipe))
}
