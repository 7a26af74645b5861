//! What a GPU is told: memory, sources of kernels, dispatches and barriers of every architecture.

use super::*;

/// What a program takes of the GPU's memory is what its footprint says, but for gaps between pieces.
#[test]
fn the_footprint_is_what_compiling_allocates() {
    /// Adds up what is allocated.
    struct Counting(Sim, Arc<AtomicU64>);
    impl Gpu for Counting {
        hand_on!(0: caps map write read submit wait);
        fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
            self.1.fetch_add(bytes, Relaxed);
            self.0.alloc(bytes, what)
        }
        fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
            Ok((0..units.len() as u32).map(Pipe).collect())
        }
        fn threads(&self, _pipe: Pipe) -> u32 {
            1024
        }
    }
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let small = Limits {
        max_tokens: 8,
        max_outputs: 2,
        n_pages: 8,
        max_positions: 256,
        n_window_pages: 6,
        n_states: 2,
        max_draft: 0,
    };
    for shape in SHAPES {
        for limits in [small, Limits { max_tokens: 100, n_pages: 60, max_positions: 1000, max_draft: 3, ..small }] {
            for cache in [CacheType::F16, CacheType::F32] {
                let allocated = Arc::new(AtomicU64::new(0));
                let count = Arc::clone(&allocated);
                let open = move || {
                    let sim = Sim::new(Options::default()).unwrap();
                    Ok(Box::new(Counting(sim, Arc::clone(&count))) as Box<dyn Gpu>)
                };
                let metal = Metal { open: Arc::new(open), cache, maps_weights: false, tuning: FINE };
                let (plan, checkpoint) = model(shape);
                let plan = ValidPlan::new(plan).unwrap();
                let said = metal.footprint(&plan, limits).allocated() as u64;
                drop(metal.compile(&plan, checkpoint, limits).unwrap());
                let allocated = allocated.load(Relaxed);
                // A gap behind each weight and cache, the least size of a buffer.
                assert!(
                    allocated.abs_diff(said) < 16 << 10,
                    "{allocated} allocated, {said} said: {shape:?} {limits:?}"
                );
            }
        }
    }
}

/// A GPU that runs nothing and keeps what it is told.
struct Recorder {
    caps: Caps,
    told: Arc<Mutex<Told>>,
    n_bufs: u32,
}

/// What a [`Recorder`] was told.
#[derive(Default)]
pub struct Told {
    /// Sources by the names of their units.
    sources: BTreeMap<String, String>,
    /// Dispatches and barriers of all lists.
    counts: (usize, usize),
}

/// The backend on a recorder.
pub fn recorder(told: &Arc<Mutex<Told>>) -> Metal {
    let (told, caps) = (Arc::clone(told), Caps { name: "recorder".into(), family: 7, max_buffer: 1 << 40 });
    let open = move || {
        let (caps, told) = (caps.clone(), Arc::clone(&told));
        Ok(Box::new(Recorder { caps, told, n_bufs: 0 }) as Box<dyn Gpu>)
    };
    Metal { open: Arc::new(open), cache: CacheType::F16, maps_weights: false, tuning: FINE }
}

impl Gpu for Recorder {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn alloc(&mut self, _bytes: u64, _what: &'static str) -> Result<Buf, GpuError> {
        self.n_bufs += 1;
        Ok(Buf(self.n_bufs - 1))
    }
    fn map(&mut self, _mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        Ok(None)
    }
    fn write(&mut self, _to: Span, _bytes: &[u8]) -> Result<(), GpuError> {
        Ok(())
    }
    fn read(&mut self, _from: Span, _out: &mut [u8]) -> Result<(), GpuError> {
        Err(GpuError::Lost("nothing is computed".into()))
    }
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        let sources = &mut self.told.lock().unwrap().sources;
        sources.extend(units.iter().map(|unit| (unit.name.clone(), unit.source.clone())));
        Ok((0..units.len() as u32).map(Pipe).collect())
    }
    fn threads(&self, _pipe: Pipe) -> u32 {
        1024
    }
    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        let ((dispatches, barriers), told) = (list.counts(), &mut *self.told.lock().unwrap());
        told.counts = (told.counts.0 + dispatches, told.counts.1 + barriers);
        Ok(Ticket(1))
    }
    fn wait(&mut self, _ticket: Ticket, _limit: Duration) -> Result<Times, GpuError> {
        Err(GpuError::Lost("nothing is computed".into()))
    }
}

/// Writes the source of every kernel, for every weight type and every model of the tree, to the folder that
/// `MOEBIUS_METAL_SOURCES` names: what Apple's compiler is to be tried on.
#[test]
fn sources_for_another_compiler() {
    let told = Arc::default();
    let metal = recorder(&told);
    for cache in [CacheType::F16, CacheType::F32] {
        let metal = Metal { cache, ..metal.clone() };
        SHAPES.iter().for_each(|shape| drop(Session::new(&metal, &model(*shape), 64)));
    }
    for t in WeightType::ALL {
        let n = t.block_len().max(64);
        let shape = Shape { d_model: n, d_k: n, d_v: n, d_ff: n, types: [t; 5], ..PLAIN };
        drop(Session::new(&metal, &model(shape), 64));
    }
    for file in FILES.iter().chain(&["published/deepseek_v32/hf"]) {
        drop(Session::new(&metal, &of_file(&metal, file), 64));
    }
    let blocks = Metal { cache: CacheType::Q8_0, ..metal.clone() };
    drop(Session::new(&blocks, &model(Shape { d_k: 32, d_v: 32, ..SMALL }), 64));
    let sources = &told.lock().unwrap().sources;
    assert!(sources.len() > WeightType::ALL.len());
    if let Some(folder) = std::env::var_os("MOEBIUS_METAL_SOURCES") {
        std::fs::create_dir_all(&folder).unwrap();
        for (i, (name, source)) in sources.iter().enumerate() {
            std::fs::write(Path::new(&folder).join(format!("{i:04}.metal")), format!("// {name}\n{source}")).unwrap();
        }
    }
}

/// Dispatches and barriers of a token of each architecture, layer by layer, as `moebius plan` has them without a GPU
/// and as a program sends them. They are pinned: more of either cost time on every token.
#[test]
fn dispatches_of_every_architecture() {
    // Of each layer; of the whole, which has an embedding before them and logits behind. The first layer has a norm of
    // its own before it, and the last one selects rows, twice or three times. Else a layer of attention and experts is
    // 10, with a gate 11, a delta rule and experts 10, latent attention and experts 11, 13 with a latent query.
    type Counts = (usize, usize);
    const WANTED: &[(&str, &[Counts], Counts)] = &[
        ("deepseekv2/model-q8_0.gguf", &[(11, 10), (12, 11), (14, 12)], (39, 34)),
        ("deepseekv3/model-q5_1.gguf", &[(12, 12), (15, 14)], (29, 27)),
        ("gemma3/model-q5_0.gguf", &[(9, 9), (8, 8), (10, 9)], (29, 27)),
        ("gemma4/model-q4_1.gguf", &[(14, 11), (13, 10), (16, 12)], (46, 35)),
        ("glm4moe/model-q4_0.gguf", &[(9, 9), (12, 11)], (23, 21)),
        ("gptoss/model-mxfp4.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("llama/model-q5_1.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("mixtral/model-q4_1.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("qwen2/model-q4_0.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("qwen3/model-q8_0.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("qwen35/model-q8_0.gguf", &[(10, 10), (12, 10)], (24, 21)),
        ("qwen3moe/model-q4_0.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("qwen3next/model-q8_0.gguf", &[(11, 11), (14, 12)], (27, 24)),
        ("published/lfm2_moe/hf", &[(11, 11), (10, 10), (15, 13)], (38, 35)),
        ("published/nemotron_h_latent/hf", &[(10, 9), (12, 7), (7, 6)], (31, 23)),
        ("published/granitemoehybrid/hf", &[(20, 15), (17, 12)], (40, 29)),
        ("published/falcon_h1/hf", &[(33, 18), (36, 18)], (72, 38)),
        ("published/kimi_linear/hf", &[(25, 13), (26, 14), (19, 15)], (72, 43)),
        ("published/bailing_hybrid/hf", &[(22, 13), (15, 14), (23, 14), (18, 15)], (80, 57)),
        ("published/jamba/hf", &[(18, 16), (10, 10), (17, 15), (12, 11)], (59, 53)),
        ("published/minimax/hf", &[(20, 15), (19, 14), (12, 10), (21, 15)], (74, 55)),
        ("published/phimoe/hf", &[(11, 11), (13, 12)], (27, 25)),
    ];
    let told: Arc<Mutex<Told>> = Arc::default();
    let metal = recorder(&told);
    let mut found = Vec::new();
    for file in FILES.iter().filter(|file| !file.starts_with("types")) {
        let (plan, checkpoint) = of_file(&metal, file);
        let n_layers = plan.layers.iter().flatten().max().unwrap() + 1;
        let mut session = Session::new(&metal, &(plan.clone(), Arc::clone(&checkpoint)), 64);
        let limits = session.program.limits();
        told.lock().unwrap().counts = (0, 0);
        let pages = session.pages[0].clone();
        session.batch.push(&[1], 0, Tables { pages: &pages, window_pages: &[0], ..Tables::default() }, 0..1);
        assert!(session.program.step(&session.batch).is_err(), "a recorder computes nothing");
        let sent = told.lock().unwrap().counts;
        let lines = Outline::new(&metal, &plan, &checkpoint, limits).unwrap().step(1, 1, 0);
        let counts = |is_meant: &dyn Fn(&Line) -> bool| {
            let lines = lines.iter().filter(|line| is_meant(line));
            lines.fold((0, 0), |(n, barriers), line| (n + 1, barriers + usize::from(line.is_behind)))
        };
        let whole = counts(&|_| true);
        // The end of the first list stands for a barrier.
        assert_eq!(sent, (whole.0, whole.1 - 1), "{file}");
        let bytes: u64 = lines.iter().map(|line| line.bytes).sum();
        let all = plan.bytes_per_token() as u64;
        assert!(bytes <= all && bytes * 100 > all * 80, "{file}: {bytes} bytes of {all}, vectors left out");
        if file.starts_with("qwen3moe") {
            // Behind more positions than a part has, attention is two dispatches.
            let mut outline = Outline::new(&metal, &plan, &checkpoint, limits).unwrap();
            let counts = |depth| outline.step(1, 1, depth).iter().filter(|line| line.op == "attention").count();
            assert_eq!([30, 31, 32, 60].map(counts), [2, 2, 4, 4], "two layers");
        }
        let layers: Vec<Counts> = (0..n_layers).map(|layer| counts(&|line| line.layer == Some(layer))).collect();
        found.push((*file, layers, whole));
    }
    let wanted: Vec<_> = WANTED.iter().map(|&(file, layers, whole)| (file, layers.to_vec(), whole)).collect();
    assert_eq!(found, wanted, "file; dispatches and barriers of each layer; of the whole");
}
