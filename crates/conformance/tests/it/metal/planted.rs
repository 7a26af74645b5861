//! Mistakes planted in kernels and lists, each of which must be found; dispatches and barriers of a step.

use super::recorder::recorder;
use super::*;

/// A GPU with a mistake planted in it, or with none, and what it has seen.
struct Watched {
    sim: Sim,
    seen: Arc<Mutex<Seen>>,
    plant: Plant,
    /// Dispatches and barriers of the lists before.
    before: (usize, usize),
    /// Names of the units of pipes.
    names: Vec<String>,
}

/// What outlives a GPU.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    stats: Stats,
    sources: Vec<String>,
    /// Names of the units of all dispatches so far, and numbers of barriers before them.
    dispatched: Vec<(String, usize)>,
    /// Buffers of mapped files.
    pub n_mapped: usize,
}

/// A mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Plant {
    #[default]
    None,
    /// The n-th barrier of a kernel source is gone, or has no memory flag.
    KernelBarrier { unit: usize, n: usize, gone: bool },
    /// The n-th barrier of the list is gone.
    ListBarrier(usize),
    /// The grid of the n-th dispatch lacks its last threadgroups along its longest axis.
    Fewer(usize),
    /// The first two spans of the n-th dispatch change places.
    Swap(usize),
    /// The parameters of the n-th dispatch lack their last word.
    ShortParams(usize),
    /// The n-th dispatch is missing.
    Missing(usize),
    /// The n-th dispatch runs twice.
    Twice(usize),
}

/// Where the n-th barrier of a source is.
fn nth_barrier(source: &str, n: usize) -> Option<(usize, usize)> {
    // What is compiled for caches of blocks alone.
    let is_left_out = |at: usize| {
        let from = source[..at].rfind("#if K_TYPE == 2").filter(|_| !source.contains("#define K_TYPE 2\n"));
        from.is_some_and(|from| !source[from..at].contains("#endif"))
    };
    let all = source.match_indices("_barrier(mem_flags::").map(|(at, _)| at);
    let begin = all.filter(|&at| !is_left_out(at)).nth(n)?;
    let begin = source[..begin].rfind(|c: char| !c.is_alphanumeric()).unwrap() + 1;
    Some((begin, begin + source[begin..].find(';')?))
}

impl Plant {
    /// Whether there was something to change.
    fn in_units(self, units: &mut [Unit]) -> bool {
        let Plant::KernelBarrier { unit, n, gone } = self else { return true };
        let source = &mut units[unit].source;
        let Some((begin, end)) = nth_barrier(source, n) else { return false };
        let call = source[begin..end].to_string();
        let weak = call.replace("mem_threadgroup", "mem_none");
        source.replace_range(begin..end, if gone { "" } else { &weak });
        true
    }

    /// Changes a list, if it is the one; `before` counts dispatches and barriers of those before it.
    fn in_list(self, list: &mut List, before: (usize, usize)) {
        let (dispatches, barriers) = list.counts();
        let is_in = |n: usize, before: usize, here: usize| (before..before + here).contains(&n);
        let plant = match self {
            Plant::ListBarrier(n) if is_in(n, before.1, barriers) => Plant::ListBarrier(n - before.1),
            Plant::Fewer(n) if is_in(n, before.0, dispatches) => Plant::Fewer(n - before.0),
            Plant::Swap(n) if is_in(n, before.0, dispatches) => Plant::Swap(n - before.0),
            Plant::ShortParams(n) if is_in(n, before.0, dispatches) => Plant::ShortParams(n - before.0),
            Plant::Missing(n) if is_in(n, before.0, dispatches) => Plant::Missing(n - before.0),
            Plant::Twice(n) if is_in(n, before.0, dispatches) => Plant::Twice(n - before.0),
            _ => return,
        };
        let nth = |is_meant: fn(&Cmd) -> bool, n: usize| {
            let found = list.cmds.iter().enumerate().filter(|(_, cmd)| is_meant(cmd)).nth(n);
            found.map(|(at, _)| at).unwrap()
        };
        let dispatch = |n| {
            let end = nth(|cmd| matches!(cmd, Cmd::Groups { .. }), n);
            (nth(|cmd| matches!(cmd, Cmd::Pipe(_)), n), end)
        };
        match plant {
            Plant::None | Plant::KernelBarrier { .. } => {}
            Plant::ListBarrier(n) => drop(list.cmds.remove(nth(|cmd| *cmd == Cmd::Barrier, n))),
            Plant::Fewer(n) => {
                let end = dispatch(n).1;
                if let Cmd::Groups { grid, threads } = &mut list.cmds[end] {
                    // Of the slots of experts' tiles some may be left over.
                    let n = if *threads == 128 && grid[1] > 4 { 3 } else { 1 };
                    let longest = grid.iter_mut().max_by_key(|n| **n).unwrap();
                    *longest -= n;
                }
            }
            Plant::Swap(n) => {
                let (begin, end) = dispatch(n);
                let binds: Vec<usize> = (begin..end).filter(|&i| matches!(list.cmds[i], Cmd::Bind { .. })).collect();
                let (Some(&a), Some(&b)) = (binds.first(), binds.get(1)) else {
                    // One span alone: its slot moves.
                    if let Cmd::Bind { slot, .. } = &mut list.cmds[binds[0]] {
                        *slot += 1;
                    }
                    return;
                };
                let [Cmd::Bind { span: x, used: u, .. }, Cmd::Bind { span: y, used: v, .. }] =
                    list.cmds.get_disjoint_mut([a, b]).unwrap()
                else {
                    unreachable!()
                };
                std::mem::swap(x, y);
                std::mem::swap(u, v);
            }
            Plant::ShortParams(n) => {
                let (begin, end) = dispatch(n);
                for cmd in &mut list.cmds[begin..end] {
                    if let Cmd::Bytes { len, .. } = cmd {
                        *len -= 4;
                    }
                }
            }
            Plant::Missing(n) => {
                let (begin, end) = dispatch(n);
                list.cmds.drain(begin..=end);
            }
            Plant::Twice(n) => {
                let (begin, end) = dispatch(n);
                let again = list.cmds[begin..=end].to_vec();
                list.cmds.splice(begin..begin, again);
            }
        }
    }
}

impl Gpu for Watched {
    hand_on!(sim: caps alloc write read threads wait);
    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        let buf = self.sim.map(mapped)?;
        self.seen.lock().unwrap().n_mapped += usize::from(buf.is_some());
        Ok(buf)
    }
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        let mut units = units.to_vec();
        assert!(self.plant.in_units(&mut units));
        self.seen.lock().unwrap().sources = units.iter().map(|unit| unit.source.clone()).collect();
        self.names.extend(units.iter().map(|unit| unit.name.clone()));
        self.sim.build(&units)
    }
    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        let mut list = list.clone();
        let (dispatches, barriers) = list.counts();
        let mut n_barriers = self.before.1;
        let pipes = list.cmds.iter().filter_map(|cmd| {
            n_barriers += usize::from(*cmd == Cmd::Barrier);
            match cmd {
                Cmd::Pipe(pipe) => Some((self.names[pipe.0 as usize].clone(), n_barriers)),
                _ => None,
            }
        });
        self.seen.lock().unwrap().dispatched.extend(pipes);
        self.plant.in_list(&mut list, self.before);
        self.before = (self.before.0 + dispatches, self.before.1 + barriers);
        let ticket = self.sim.submit(&list);
        self.seen.lock().unwrap().stats = self.sim.stats();
        ticket
    }
}

/// A simulated GPU with a mistake.
pub fn planted(plant: Plant, seen: &Arc<Mutex<Seen>>) -> Metal {
    let seen = Arc::clone(seen);
    let open = move || {
        let sim = Sim::new(Options::default()).unwrap();
        Ok(Box::new(Watched { sim, seen: Arc::clone(&seen), plant, before: (0, 0), names: Vec::new() }) as Box<dyn Gpu>)
    };
    Metal { open: Arc::new(open), cache: CacheType::F32, maps_weights: false, tuning: FINE }
}

/// Dispatches and barriers of a step are pinned: more of either cost time on every token. No barrier is needless.
#[test]
fn dispatches_and_barriers_of_a_step() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    for (name, shape, dispatches, barriers) in
        [("fused", SMALL, 25, 19), ("plain", Shape { fused: false, ..SMALL }, 31, 24)]
    {
        let seen = Arc::new(Mutex::new(Seen::default()));
        Session::new(&planted(Plant::None, &seen), &model(shape), 32).step(&[(0, &tokens(2, 1))]);
        let wanted = Stats { lists: 2, dispatches, barriers, needless_barriers: 0 };
        assert_eq!(seen.lock().unwrap().stats, wanted, "{name}");
    }
}

/// What a prompt and a token behind it give with a mistake in them: the error, or the logits of both. The prompt has
/// the forms for many rows, the token those for one.
fn with(
    plant: Plant,
    tuning: Tuning,
    model: &(Plan, Arc<checkpoint::Checkpoint>),
    seen: &Arc<Mutex<Seen>>,
) -> Result<Vec<f32>, String> {
    let mut session =
        Session::compile(&Metal { tuning, ..planted(plant, seen) }, model, 64, 64).map_err(|e| e.to_string())?;
    let (prompt, pages) = (tokens(36, 1), session.pages[0].clone());
    let mut all = Vec::new();
    for range in [0..35, 35..36] {
        session.batch.clear();
        let tables = Tables { pages: &pages, window_pages: &[0, 1], ..Tables::default() };
        session.batch.push(&prompt[range.clone()], range.start, tables, 0..range.len());
        all.extend_from_slice(session.program.step(&session.batch).map_err(|e| e.to_string())?.logits);
    }
    Ok(all)
}

/// Every barrier, grid and binding of a step is needed, and the simulator says so when one is wrong.
#[test]
fn every_planted_mistake_is_found() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    fn is_tiled_attention(source: &str) -> bool {
        source.contains("kernel void attention_tiles(")
    }
    // A token's attention is by itself here, and in parts below.
    let whole = Tuning { part: 512, ..FINE };
    planted_mistakes(whole, &model(SMALL), |i, _| i < 25, |source| !is_tiled_attention(source));
    // Of the second model, the dispatches that the first does not have.
    planted_mistakes(whole, &model(SMALL_DELTA), |i, _| i < 18, |_| false);
    // Values that are staged in more than one piece.
    planted_mistakes(whole, &model(Shape { d_k: 72, d_v: 72, ..SMALL }), |_, _| false, is_tiled_attention);
}

/// The same of dispatches that do several ops, in models of files: latent attention, experts with one beside them,
/// norms that follow each other, delta rules with what comes before and behind them.
#[test]
fn every_mistake_planted_in_joined_dispatches_is_found() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    const JOINED: [&str; 7] =
        ["latent_in", "norms", "delta_in", "delta_net", "delta_chunks", "head_linear_t", "attention_merge"];
    let metal = recorder(&Arc::default());
    for file in ["deepseekv3/model-q5_1.gguf", "gemma4/model-q4_1.gguf", "qwen3next/model-q8_0.gguf"] {
        let mut known = Vec::new();
        let is_meant = |_, name: &str| {
            let kernel = name.split(' ').next().unwrap();
            let is_joined =
                JOINED.contains(&kernel) || ["SHARED=1", "SHARED=2", "SPLIT=1"].iter().any(|part| name.contains(part));
            let is_new = is_joined && !known.iter().any(|other| other == name);
            known.extend(is_new.then(|| name.to_string()));
            is_new
        };
        let is_joined = |source: &str| {
            JOINED.iter().any(|kernel| source.contains(&format!("kernel void {kernel}(")))
                || source.contains("#define SPLIT 1")
        };
        planted_mistakes(FINE, &of_file(&metal, file), is_meant, is_joined);
    }
}

/// What a kernel's barriers depend on: all that it is compiled for but for weights and the shapes of products.
fn form(source: &str) -> String {
    let none = ["WEIGHT", "PLANES", "N_PARTS", "BIAS", "ROWS", "COLUMNS", "WIDE_X", "ACT", "HAS_"];
    let defines = source.lines().skip(2).take_while(|line| line.starts_with("#define "));
    let kernel = source.lines().find(|line| line.starts_with("kernel void ")).unwrap();
    let own = defines.filter(|line| none.iter().all(|name| !line["#define ".len()..].starts_with(name)));
    [kernel].into_iter().chain(own).collect::<Vec<_>>().join(" ")
}

/// Plants mistakes in the dispatches of a prompt and of a token that are meant, by their number and the name of their
/// unit; in the barriers before them; and in the barriers of kernels whose sources are meant, of each form once.
fn planted_mistakes(
    tuning: Tuning,
    model: &(Plan, Arc<checkpoint::Checkpoint>),
    mut is_meant: impl FnMut(usize, &str) -> bool,
    is_source: impl Fn(&str) -> bool,
) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let exact = bits(&with(Plant::None, tuning, model, &seen).unwrap());
    let Seen { sources, dispatched, .. } = seen.lock().unwrap().clone();
    let mut plants = Vec::new();
    let mut before = 0;
    for (n, (name, n_barriers)) in dispatched.iter().enumerate() {
        let is_behind = *n_barriers > before;
        before = *n_barriers;
        if !is_meant(n, name) {
            continue;
        }
        plants.extend([Plant::Fewer(n), Plant::ShortParams(n), Plant::Missing(n)]);
        if n % 3 == 0 {
            plants.extend([Plant::Swap(n), Plant::Twice(n)]);
        }
        plants.extend(is_behind.then(|| Plant::ListBarrier(n_barriers - 1)));
    }
    // The model's router has no groups of experts: the first barrier of `route` is the only one that it reaches.
    let mut forms = Vec::new();
    for (unit, source) in sources.iter().enumerate().filter(|(_, source)| is_source(source)) {
        if forms.contains(&form(source)) {
            continue;
        }
        forms.push(form(source));
        // Barriers of products are in their tiles or transposed forms, and the sum without a norm has none.
        let is_without = ["TILED 0", "TRANSPOSED 0", "NORM 0"].iter().any(|d| source.contains(&format!("#define {d}")));
        // In a delta rule's tiles the first is of the form without a norm, and those of a simdgroup wait for what is
        // not finite: `tests/ops` plants mistakes there.
        let is_elsewhere = |n: usize| {
            let (begin, _) = nth_barrier(source, n).unwrap();
            source.contains("kernel void delta_chunks(") && (n == 0 || source[begin..].starts_with("simdgroup_"))
        };
        let is_reached =
            |n: &usize| !is_without && (!source.contains("kernel void route(") || *n == 0) && !is_elsewhere(*n);
        for n in (0..).take_while(|&n| nth_barrier(source, n).is_some()).filter(is_reached) {
            plants.extend([true, false].map(|gone| Plant::KernelBarrier { unit, n, gone }));
        }
    }
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let work = || {
        while let Some(&plant) = plants.get(next.fetch_add(1, Relaxed)) {
            match with(plant, tuning, model, &Arc::default()) {
                Ok(logits) if bits(&logits) == exact => missed.lock().unwrap().push(plant),
                Ok(_) => println!("{plant:?}: other logits"),
                Err(why) => println!("{plant:?}: {}", why.lines().next().unwrap_or_default()),
            }
        }
    };
    std::thread::scope(|scope| [scope.spawn(work), scope.spawn(work)].map(|thread| thread.join().unwrap()));
    println!("{} mistakes", plants.len());
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "{} of {} not found: {missed:?}", missed.len(), plants.len());
}
