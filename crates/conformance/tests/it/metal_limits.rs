//! What no model meets as a limit of the Metal backend, on a simulated GPU: offsets past 4 GiB and past 32 bits, 1,024
//! experts, 32 of them a token, positions to 2^20, 65,536 keys and more, any number of rows; and the routers of the
//! original model code. Skips where there is no clang.
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backend::CacheType;
use backend::reference::Reference;
use backend::{Backend, Batch, Limits, Tables};
use checkpoint::Checkpoint;
use conformance::backends::{self, simulated};
use conformance::{Maker, N_VOCAB, PLAIN, Random, Session, Shape, hand_on, model, tokens};
use gpu::commands::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit, Use};
use gpu::metal::{Metal, Tuning};
use metal_sim::{Options, Sim};
use model::plan::{Op, Plan, Router, Rows, ValidPlan};
use quant::WeightType::F32;

const SMALL: Shape =
    Shape { d_model: 32, n_head: 2, n_kv: 1, d_k: 16, d_v: 16, n_expert: 5, n_used: 2, d_ff: 16, ..PLAIN };

/// The norm of the difference over the norm of the exact numbers. NaN never passes a comparison with it.
fn off(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let sum = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let error = sum(&mut found.iter().zip(exact).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    (error / sum(&mut exact.iter().map(|&x| f64::from(x)))).sqrt()
}

/// A simulated GPU whose caches hold something from the start.
struct Filled {
    sim: Sim,
    /// What is drawn; zeros where there is none.
    seed: Option<u64>,
}

impl Gpu for Filled {
    hand_on!(sim: caps map write read build threads submit wait);
    fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
        let buf = self.sim.alloc(bytes, what)?;
        if what == "cache" {
            let mut random = Random(self.seed.unwrap_or(1));
            let is_zero = self.seed.is_none();
            let mut draw = || if is_zero { 0.0 } else { random.float() };
            let piece = 1 << 20;
            for at in (0..bytes).step_by(piece) {
                let len = (bytes - at).min(piece as u64);
                let floats: Vec<u8> = (0..len / 4).flat_map(|_| draw().to_le_bytes()).collect();
                self.sim.write(Span { buf, at, len: floats.len() as u64 }, &floats)?;
            }
        }
        Ok(buf)
    }
}

/// The backend on a GPU whose caches are filled, in f32.
fn filled(seed: Option<u64>) -> Option<Metal> {
    let metal = simulated(CacheType::F32, Options::default())?;
    let open = move || {
        let sim = Sim::new(Options::default()).map_err(|why| GpuError::Lost(format!("{why:#}")))?;
        Ok(Box::new(Filled { sim, seed }) as Box<dyn Gpu>)
    };
    Some(Metal { open: Arc::new(open), ..metal })
}

/// Each number of rows around those at which forms change, and others that nothing divides.
#[test]
fn any_number_of_rows() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let metal = Metal { tuning: Tuning { many: 8, ..metal.tuning }, ..metal };
    let model = model(SMALL);
    for n in [1, 2, 3, 8, 9, 10, 11, 31, 33, 47] {
        let run = |backend: &dyn Backend| Session::new(backend, &model, 64).step(&[(0, &tokens(n, 3))]).to_vec();
        let error = off(&run(&metal), &run(&Reference));
        assert!(error < 1e-5, "{n} rows: off by {error:e}");
    }
}

/// 1,024 experts of which a token takes 32, a pair at a time and sorted by expert.
#[test]
fn a_thousand_experts() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(Shape { n_expert: 1024, n_used: 32, ..SMALL });
    let run = |backend: &dyn Backend| {
        let mut session = Session::new(backend, &model, 96);
        // Two pairs an expert are sorted.
        let mut all = session.step(&[(0, &tokens(66, 5))]).to_vec();
        all.extend_from_slice(session.step(&[(0, &tokens(1, 6)), (1, &tokens(2, 7))]));
        all
    };
    let error = off(&run(&metal), &run(&Reference));
    assert!(error < 1e-5, "off by {error:e}");
}

/// Positions up to 2^20, where layers keep a window: rotary angles and page tables.
#[test]
fn positions_to_the_millionth() {
    let Some(metal) = filled(None) else { return };
    let model = model(Shape { window: Some(20), forgets: true, ..SMALL });
    let run = |backend: &dyn Backend| {
        let mut session = Session::compile(backend, &model, 1 << 20, 48).unwrap();
        session.n_past[0] = (1 << 20) - 42;
        // The first tokens look at positions that hold nothing, so what they give says nothing.
        session.step_with_faults(&[(0, &tokens(40, 1))]);
        let mut all = session.step(&[(0, &tokens(1, 2)), (1, &tokens(3, 3))]).to_vec();
        all.extend_from_slice(session.step(&[(0, &tokens(1, 4))]));
        all
    };
    let error = off(&run(&metal), &run(&Reference));
    assert!(error < 1e-5, "off by {error:e}");
}

/// A token behind 4,500 and behind 70,000 keys, in a tile and by itself.
#[test]
fn long_contexts() {
    let Some(metal) = filled(Some(7)) else { return };
    let model = model(SMALL);
    for n in [4_500, 70_000] {
        let mut session = Session::compile(&metal, &model, n + 20, 10).unwrap();
        session.n_past[0] = n;
        let prompt = tokens(10, 1);
        let tile = session.step(&[(0, &prompt)])[9 * N_VOCAB..].to_vec();
        // The same token once more: its key and value are written again.
        session.n_past[0] = n + 9;
        let error = off(session.step(&[(0, &prompt[9..])]), &tile);
        assert!(error < 1e-5, "behind {n} keys: off by {error:e}");
    }
}

/// How far a few steps are off whose pages lie behind more than 2^32 numbers of a cache, on a GPU of which one text
/// may be changed.
fn far_pages(kernel: &'static str, from: &'static str, to: &'static str) -> Result<f64, String> {
    let options = Options { max_buffer: 1 << 40, ..Options::default() };
    let metal = backends::rewritten(options, kernel, from, to);
    let model = model(SMALL);
    let (plan, weights) = (ValidPlan::new(model.0.clone()).unwrap(), Arc::clone(&model.1));
    // A page has 512 keys' numbers and as many of values. Memory holds those that are written.
    let n_pages = 9_000_000;
    let limits = Limits {
        max_tokens: 48,
        max_outputs: 48,
        n_pages,
        max_positions: 96,
        n_window_pages: 0,
        n_states: 0,
        max_draft: 0,
    };
    let mut program = metal.compile(&plan, weights, limits).unwrap();
    let pages = [n_pages as u32 - 1, 0, n_pages as u32 - 2];
    let mut exact = Session::new(&Reference, &model, 96);
    let (mut batch, mut pos, mut worst) = (Batch::default(), 0, 0.0f64);
    for n in [40, 1, 3] {
        let some = tokens(n, n as u64);
        batch.clear();
        batch.push(&some, pos, Tables { pages: &pages, ..Tables::default() }, 0..n);
        pos += n;
        let found = program.step(&batch).map_err(|e| e.to_string())?;
        worst = worst.max(off(found.logits, exact.step(&[(0, &some)])));
    }
    Ok(worst)
}

/// Pages of a cache whose numbers lie past 2^32, in appends, rows and tiles of attention; kernels that count them in 32
/// bits are found.
#[test]
fn caches_past_16_gib() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let error = far_pages("", "", "").unwrap();
    assert!(error < 1e-5, "off by {error:e}");
    for (kernel, from, to) in [
        ("attention", "keys = k_cache + at * page_of_keys(D_K)", "keys = k_cache + (uint)(at * page_of_keys(D_K))"),
        (
            "attention_tiles",
            "keys = k_cache + at * page_of_keys(D_K)",
            "keys = k_cache + (uint)(at * page_of_keys(D_K))",
        ),
    ] {
        let found = far_pages(kernel, from, to);
        assert!(!matches!(found, Ok(error) if error < 1e-3), "{kernel} counts in 32 bits, and gives {found:?}");
    }
}

/// How far rows past 32,767 of a norm are off; a text of its kernel may be changed.
fn many_rows(from: &'static str, to: &'static str) -> Result<f64, String> {
    let n_rows = 33_000;
    let plan = Plan::new("a norm", N_VOCAB, 8, n_rows);
    let mut m = Maker { plan, tensors: Vec::new(), random: Random(5) };
    let (table, w) = (m.weight(&[N_VOCAB, 8], F32), m.weight(&[8], F32));
    let (x, normed) = (m.buf(Rows::Tokens, 8), m.buf(Rows::Tokens, 8));
    let picked = m.buf(Rows::Outputs, 8);
    m.op(Op::Embed { table, scale: 1.0, out: x });
    m.op(Op::RmsNorm { x, residual: None, w, eps: 1e-5, out: normed });
    m.op(Op::Select { x: normed, out: picked });
    m.plan.logits = m.linear(picked, Rows::Outputs, N_VOCAB, F32, false);
    let model = m.finish(false);
    let n_pages = n_rows.div_ceil(backend::PAGE);
    let limits = Limits { max_tokens: n_rows, max_outputs: 2, n_pages, max_positions: n_rows, ..Limits::default() };
    let (some, pages) = (tokens(n_rows, 3), (0..n_pages as u32).collect::<Vec<u32>>());
    let run = |backend: &dyn Backend| -> Result<Vec<f32>, String> {
        let plan = ValidPlan::new(model.0.clone()).unwrap();
        let mut program = backend.compile(&plan, Arc::clone(&model.1), limits).map_err(|e| e.to_string())?;
        let mut batch = Batch::default();
        batch.push(&some, 0, Tables { pages: &pages, ..Tables::default() }, n_rows - 2..n_rows);
        Ok(program.step(&batch).map_err(|e| e.to_string())?.logits.to_vec())
    };
    Ok(off(&run(&backends::rewritten(Options::default(), "rms_norm", from, to))?, &run(&Reference)?))
}

/// More rows than 15 bits count; a kernel that has no more bits is found.
#[test]
fn rows_past_32767() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let error = many_rows("", "").unwrap();
    assert!(error < 1e-5, "off by {error:e}");
    let found = many_rows("(ulong)row_idx * a.d", "(ulong)((short)row_idx & 0x7fff) * a.d");
    assert!(!matches!(found, Ok(error) if error < 1e-3), "rows are counted with 15 bits: {found:?}");
}

/// Keeps the sources of a plan's kernels.
struct Recorder(Caps, Arc<Mutex<Vec<Unit>>>, u32);

impl Gpu for Recorder {
    fn caps(&self) -> &Caps {
        &self.0
    }
    fn alloc(&mut self, _bytes: u64, _what: &'static str) -> Result<Buf, GpuError> {
        self.2 += 1;
        Ok(Buf(self.2 - 1))
    }
    fn map(&mut self, _mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        Ok(None)
    }
    fn write(&mut self, _to: Span, _bytes: &[u8]) -> Result<(), GpuError> {
        Ok(())
    }
    fn read(&mut self, _from: Span, _out: &mut [u8]) -> Result<(), GpuError> {
        Ok(())
    }
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        self.1.lock().unwrap().extend(units.iter().cloned());
        Ok((0..units.len() as u32).map(Pipe).collect())
    }
    fn threads(&self, _pipe: Pipe) -> u32 {
        1024
    }
    fn submit(&mut self, _list: &List) -> Result<Ticket, GpuError> {
        Ok(Ticket(1))
    }
    fn wait(&mut self, _ticket: Ticket, _limit: Duration) -> Result<Times, GpuError> {
        Ok(Times::default())
    }
}

/// Matrices whose bytes lie past 4 GiB, of which memory holds the few rows that are read: an expert's and a table's;
/// kernels that count bytes in 32 bits are found.
#[test]
fn weights_past_4_gib() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    far_weights(&metal, |source| source.clone()).unwrap();
    let narrow = |source: &String| source.replace("q + blocks * W::BYTES;", "q + (u32)(blocks * W::BYTES);");
    assert!(far_weights(&metal, narrow).is_err(), "offsets of 32 bits pass");
}

/// An expert and a row of a table behind 4 GiB of others, by kernels whose sources may be changed; what is wrong.
fn far_weights(metal: &Metal, change: impl Fn(&String) -> String) -> Result<(), String> {
    let units: Arc<Mutex<Vec<Unit>>> = Arc::default();
    let known = Arc::clone(&units);
    let open = move || {
        let caps = Caps { name: "recorder".into(), family: 7, max_buffer: 1 << 40 };
        Ok(Box::new(Recorder(caps, Arc::clone(&known), 0)) as Box<dyn Gpu>)
    };
    let shape = Shape { types: [F32; 5], ..SMALL };
    drop(Session::new(&Metal { open: Arc::new(open), ..metal.clone() }, &model(shape), 64));
    let unit = |kernel: &str| {
        let unit = units.lock().unwrap().iter().find(|unit| unit.kernel == kernel).unwrap().clone();
        Unit { source: change(&unit.source), ..unit }
    };
    let mut sim = Sim::new(Options { max_buffer: 1 << 40, ..Options::default() }).unwrap();
    let mut place = |len: u64, at: u64, values: &[f32]| {
        let buf = sim.alloc(len, "a test").unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        if !bytes.is_empty() {
            sim.write(Span { buf, at, len: bytes.len() as u64 }, &bytes).unwrap();
        }
        Span { buf, at: 0, len }
    };
    // The last of 1,024 experts, of 3 rows of 400,000 numbers: 4.8 MB each.
    let (n_expert, n, k) = (1024u64, 3u64, 400_000u64);
    let mut random = Random(3);
    let mut draw = |n: u64| (0..n).map(|_| random.float()).collect::<Vec<f32>>();
    let (w, x) = (draw(n * k), draw(k));
    let all = place(4 * n_expert * n * k, 4 * (n_expert - 1) * n * k, &w);
    assert!(all.len > 4 << 30);
    let (from, ids) = (place(4 * k, 0, &x), place(4, 0, &[f32::from_bits(n_expert as u32 - 1)]));
    let (weights, out) = (place(4, 0, &[1.0]), place(4 * n, 0, &vec![0.0; n as usize]));
    // The last row of a table of 1,200,000 rows in bf16, two numbers a word.
    let (rows, d) = (1_200_000u64, 2048u64);
    let row: Vec<f32> = draw(d).iter().map(|x| f32::from_bits(x.to_bits() >> 16 << 16)).collect();
    let words: Vec<f32> = row.chunks_exact(2).map(|x| f32::from_bits(x[0].to_bits() >> 16 | x[1].to_bits())).collect();
    let table = place(2 * rows * d, 2 * (rows - 1) * d, &words);
    assert!(table.len > 4 << 30);
    let (token, found) = (place(4, 0, &[f32::from_bits(rows as u32 - 1)]), place(4 * d, 0, &[]));
    let [sum, embed] = sim.build(&[unit("experts_sum"), unit("embed")]).unwrap()[..] else { unreachable!() };

    let mut list = List::default();
    let bind = |slot, span, used| Cmd::Bind { slot, span, used };
    list.cmds.push(Cmd::Pipe(sum));
    for (slot, span, used) in
        [(0, all, Use::Read), (3, from, Use::Read), (4, ids, Use::Read), (5, out, Use::Update), (8, weights, Use::Read)]
    {
        list.cmds.push(bind(slot, span, used));
    }
    list.params(6, &[n as u32, k as u32, 1, 1, 0, 0]);
    list.cmds.push(Cmd::Groups { grid: [n as u32, 1, 1], threads: 64 });
    list.cmds.push(Cmd::Pipe(embed));
    for (slot, span, used) in [(0, table, Use::Read), (3, token, Use::Read), (4, found, Use::Write)] {
        list.cmds.push(bind(slot, span, used));
    }
    list.params(5, &[d as u32, 1f32.to_bits(), 1, 0]);
    list.cmds.push(Cmd::Groups { grid: [d.div_ceil(16 * 64) as u32, 1, 1], threads: 64 });
    let ticket = sim.submit(&list).map_err(|e| e.to_string())?;
    sim.wait(ticket, Duration::from_secs(60)).map_err(|e| e.to_string())?;
    let mut read = |span: Span| {
        let mut bytes = vec![0; span.len as usize];
        sim.read(span, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect::<Vec<f32>>()
    };
    let dot = |row: &[f32]| row.iter().zip(&x).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;
    let exact: Vec<f32> = w.chunks_exact(k as usize).map(dot).collect();
    let error = off(&read(out), &exact);
    if error >= 1e-4 || error.is_nan() || read(found) != row {
        return Err(format!("an expert is off by {error:e}, or a row of a table differs"));
    }
    Ok(())
}

/// Routers of the original model code on rows full of ties: as many of them as there is time for.
#[test]
fn routers_of_the_original_code() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let n_rows = if backends::wide() { conformance::router_cases::N_ROWS } else { 160 };
    conformance::router_cases::check_rows(1e-6, n_rows, &mut |x, router, bias, scale, n_used| {
        let n_expert = x.len() / n_rows;
        let model = router_model(x, n_expert, router, bias, scale, n_used);
        let limits = Limits {
            max_tokens: n_rows,
            max_outputs: n_rows,
            n_pages: n_rows.div_ceil(32),
            max_positions: n_rows,
            n_window_pages: 0,
            n_states: 0,
            max_draft: 0,
        };
        let plan = metal.lower(ValidPlan::new(model.0).unwrap()).unwrap();
        let mut program = metal.compile(&plan, model.1, limits).unwrap();
        program.trace_routing(true);
        let mut batch = Batch::default();
        let all: Vec<u32> = (0..n_rows as u32).collect();
        let pages: Vec<u32> = (0..n_rows.div_ceil(32) as u32).collect();
        batch.push(&all, 0, Tables { pages: &pages, ..Tables::default() }, 0..n_rows);
        let out = program.step(&batch).unwrap();
        assert!(out.faults.is_empty());
        let ids = out.routing.unwrap().iter().map(|&id| id.into()).collect();
        let weights = out.logits.chunks_exact(n_rows).flat_map(|row| row[..n_used].to_vec()).collect();
        (ids, weights)
    });
}

/// A plan that routes the rows of a table; its logits are the weights, repeated to as many as there are rows.
fn router_model(
    x: &[f32],
    n_expert: usize,
    router: &Router,
    bias: Option<&[f32]>,
    scale: Option<&[f32]>,
    n_used: usize,
) -> (Plan, Arc<Checkpoint>) {
    let n_rows = x.len() / n_expert;
    let plan = Plan::new("a router", n_rows, n_expert, 1 << 20);
    let mut m = Maker { plan, tensors: Vec::new(), random: Random(1) };
    let table = m.weight_of(&[n_rows, n_expert], F32, |_, i| x[i * n_expert..][..n_expert].to_vec());
    let mut vector =
        |values: Option<&[f32]>| values.map(|values| m.weight_of(&[n_expert], F32, |_, _| values.to_vec()));
    let router = Router { bias: vector(bias), expert_scale: vector(scale), ..*router };
    let logits = m.buf(Rows::Tokens, n_expert);
    let weights = m.buf(Rows::Tokens, n_used);
    let ids = m.buf(Rows::Tokens, n_used);
    m.plan.bufs[ids.0 as usize].elem = model::plan::Elem::U32;
    let more = n_rows - n_used;
    let filling = m.buf(Rows::Tokens, n_expert);
    let out = m.buf(Rows::Outputs, n_rows);
    let joined = m.buf(Rows::Tokens, n_rows);
    m.op(Op::Embed { table, scale: 1.0, out: logits });
    m.op(Op::Embed { table, scale: 1.0, out: filling });
    m.op(Op::Route { logits, router, n_used, ids, weights });
    let mut parts = vec![(n_used, weights)];
    parts.extend((0..more / n_expert).map(|_| (n_expert, filling)));
    let rest = more % n_expert;
    if rest > 0 {
        let (some, other) = (m.buf(Rows::Tokens, rest), m.buf(Rows::Tokens, n_expert - rest));
        m.op(Op::SplitHeads { x: filling, n_head: 1, parts: vec![(rest, some), (n_expert - rest, other)] });
        parts.push((rest, some));
    }
    m.op(Op::JoinHeads { parts, n_head: 1, out: joined });
    m.op(Op::Select { x: joined, out });
    m.plan.logits = out;
    m.finish(false)
}
