//! What is fuzzed: how an input of each kind is used, what that may cost, and the inputs to begin with.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use backend::{
    Ask, Batch, Drafts, Kinds, Limits, Output, Picks, Profile, Program, RouterInfo, Save, StepError, StreamStats,
    SumInputs,
};
use checkpoint::Checkpoint;
use engine::folder;
use engine::grammar::{Constraint, Error, Grammars, Lead, MAX_RULE_BYTES, Rule, Trial, from_gbnf};
use engine::images::{Image, Processor};
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, EventKind, Events, Options, Request};
use engine::template::{Chat, ChatTemplate, Message};
use engine::tokenizer::{Encode, Tokenizer};
use image::ImageFormat;
use model::plan::ValidPlan;
use std::sync::atomic::AtomicBool;

use crate::mutate::{self, BETWEEN};

#[allow(dead_code)] // parts of it belong to other tests
#[path = "../../checkpoint/tests/it/exercise.rs"]
mod exercise;
#[path = "../../checkpoint/tests/it/exercise_folder.rs"]
mod exercise_folder;

/// A kind of input.
pub struct Target {
    pub name: &'static str,
    /// Uses an input: what became of it, beginning with `ok` where it was accepted. A panic is a find. `None`: a server
    /// gets it.
    pub run: Option<fn(&[u8]) -> String>,
    /// What a run may take of the processor's time.
    pub time: Duration,
    /// What a run may have resident beyond what the process has, in MiB.
    pub mib: usize,
    /// Whether a library on the way catches panics of its own.
    pub catches: bool,
    seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(
    name: &'static str,
    run: Option<fn(&[u8]) -> String>,
    seconds: u64,
    mib: usize,
    seeds: fn() -> Vec<Vec<u8>>,
) -> Target {
    Target { name, run, time: Duration::from_secs(seconds), mib, catches: false, seeds }
}

pub const TARGETS: [Target; 10] = [
    target("gguf", Some(gguf), 5, 512, gguf_seeds),
    target("folder", Some(model_folder), 5, 512, folder_seeds),
    target("tokenizer", Some(tokenizer), 8, 1024, tokenizer_seeds),
    target("template", Some(template), 10, 1200, template_seeds),
    Target { catches: true, ..target("grammar", Some(grammar), 40, 1500, Vec::new) },
    target("gbnf", Some(gbnf), 2, 128, gbnf_seeds),
    target("image", Some(image_file), 12, 1400, image_seeds),
    target("body", None, 30, 1024, Vec::new),
    target("http", None, 30, 1024, Vec::new),
    target("canary", Some(canary), 1, 64, Vec::new),
];

/// Breaks every promise on request, so that a test can see that it is found. `all` leaves it out.
fn canary(input: &[u8]) -> String {
    match input {
        b"panic" => panic!("as was asked"),
        b"panic in a thread" => drop(std::thread::spawn(|| panic!("as was asked")).join()),
        b"abort" => std::process::abort(),
        b"slow" => {
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(8) {
                std::hint::black_box(mutate::hash(input));
            }
        }
        b"large" => drop(std::hint::black_box(vec![1u8; 128 << 20])),
        b"endless" => {
            let mut all = Vec::new();
            loop {
                all.push(vec![0u8; 1 << 30]);
                std::hint::black_box(&all);
            }
        }
        _ => {}
    }
    "ok".into()
}

/// Where things lie in the project.
fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The inputs to begin with: those of the project's tests, and the files of `corpus/<name>`, which hold what was found.
pub fn corpus(target: &Target) -> Result<Vec<Vec<u8>>, String> {
    let mut inputs = (target.seeds)();
    let own = files(&project("crates/fuzz/corpus").join(target.name), "");
    inputs.extend(own.iter().filter_map(|path| std::fs::read(path).ok()));
    let mut seen = HashSet::new();
    inputs.retain(|input| seen.insert(mutate::hash(input)));
    if inputs.is_empty() { Err(format!("fuzz {}: there are no inputs to begin with", target.name)) } else { Ok(inputs) }
}

/// The files of a folder whose names end so, in order.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| path.is_file() && path.to_string_lossy().ends_with(end));
    files.sort();
    files
}

/// The folders of the test models, in order: those of a family, or of its forms.
fn models() -> Vec<PathBuf> {
    let below = |folder: &PathBuf| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let families = below(&project("crates/conformance/tests/data"));
    let forms: Vec<PathBuf> = families.iter().flat_map(below).collect();
    let parts: Vec<PathBuf> = forms.iter().flat_map(below).collect();
    let mut folders = [families, forms, parts].concat();
    folders.sort();
    folders
}

fn gguf_seeds() -> Vec<Vec<u8>> {
    /// Files of a family differ in the types of their weights: the small ones say the same.
    const MAX_BYTES: u64 = 200 << 10;
    let mut paths = files(&project("crates/engine/tests/data"), ".gguf");
    paths.extend(models().iter().flat_map(|folder| files(folder, ".gguf")));
    paths.retain(|path| path.metadata().is_ok_and(|file| file.len() <= MAX_BYTES));
    let mut seeds: Vec<Vec<u8>> = paths.iter().filter_map(|path| std::fs::read(path).ok()).collect();
    seeds.push(exercise::valid());
    seeds
}

/// Bytes as a file, as a model, as a tokenizer and as a template.
fn gguf(input: &[u8]) -> String {
    exercise::exercise(input.to_vec());
    match checkpoint::from_bytes("fuzz.gguf", input.to_vec()) {
        Ok(checkpoint) => use_model(&checkpoint),
        Err(error) => error.to_string(),
    }
}

fn use_model(checkpoint: &Checkpoint) -> String {
    let tokens = match Tokenizer::load(checkpoint) {
        Ok(tokenizer) => use_tokenizer(&tokenizer, "the  quick 🦊 don't <|im_end|> 123\n"),
        Err(error) => error.to_string(),
    };
    let (sampling, template) = (folder::sampling(checkpoint), folder::chat_template(checkpoint));
    let rendered = match template.map(|template| template.map(|source| render(&source, &messages()))) {
        Ok(rendered) => rendered.unwrap_or_default(),
        Err(error) => error.to_string(),
    };
    // Its draft head is read only where drafts are asked for.
    let _ = model::build_drafting(checkpoint);
    let built = match model::build(checkpoint) {
        Ok(plan) => format!("ok {} lines, {}", plan.to_string().lines().count(), see(checkpoint, &plan, None)),
        Err(error) => match checkpoint.meta().opt_str("general.architecture") {
            // An encoder alone, whichever model it belongs to.
            Ok(Some("clip")) => {
                let seen = SEEING.iter().map(|(text, plan)| see(text, plan, Some(checkpoint)));
                seen.min_by_key(|said| !said.starts_with("ok")).unwrap_or_default()
            }
            _ => error.to_string(),
        },
    };
    format!("{built}; {tokens}; {rendered}; {}", sampling.map_or_else(|e| e.to_string(), |_| String::new()))
}

/// Tiny models that see, of each family of encoders.
static SEEING: LazyLock<Vec<(Checkpoint, ValidPlan)>> = LazyLock::new(|| {
    let open = |name: &str| -> Option<_> {
        let path = project("crates/conformance/tests/data/images").join(name).join("hf");
        let checkpoint = checkpoint::open(&path).ok()?;
        let plan = model::build(&checkpoint).ok()?;
        Some((checkpoint, plan))
    };
    ["qwen3_vl_moe", "gemma4", "gemma4_clipped"].into_iter().filter_map(open).collect()
});

/// A model's own encoder or another file's, and a small image as it takes one.
fn see(text: &Checkpoint, plan: &ValidPlan, encoder: Option<&Checkpoint>) -> String {
    let vision = match model::vision::open(text, plan, encoder) {
        Ok(Some((_, vision))) => vision,
        Ok(None) => return "sees none".into(),
        Err(error) => return error.to_string(),
    };
    let image = Image { width: 9, height: 6, pixels: vec![7; 9 * 6 * 3], hash: [0; 32] };
    let seen = Processor::open(encoder.unwrap_or(text), &vision, 64).and_then(|processor| processor.rows(&image));
    seen.map_or_else(|error| error.to_string(), |rows| format!("ok {} patches", rows.places.len()))
}

fn use_tokenizer(tokenizer: &Tokenizer, text: &str) -> String {
    for special in [false, true] {
        let ids = tokenizer.encode(text, Encode { add_special: special, parse_special: special });
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()), "an id outside the vocabulary");
        tokenizer.decode(&ids);
        if let Some(most) = tokenizer.max_text_bytes(ids.len()) {
            assert!(special || text.len() <= most, "{} bytes are {} tokens, at most {most}", text.len(), ids.len());
        }
    }
    tokenizer.decode(&[0, 1, 2, u32::MAX, tokenizer.n_vocab() as u32]);
    "ok".into()
}

fn folder_seeds() -> Vec<Vec<u8>> {
    let index = r#"{"weight_map":{"a.weight":"model-1.safetensors"}}"#;
    let parts = [exercise_folder::CONFIG, exercise_folder::HEADER, index].map(str::as_bytes);
    let mut seeds = vec![parts.join(BETWEEN)];
    for folder in models() {
        let (config, weights) = (folder.join("config.json"), folder.join("model.safetensors"));
        if let (Ok(config), Ok(weights)) = (std::fs::read(config), std::fs::read(weights))
            && let Some((len, rest)) = weights.split_first_chunk::<8>()
            && let Some(header) = rest.get(..u64::from_le_bytes(*len) as usize)
        {
            seeds.push([&config[..], header, b"{}"].join(BETWEEN));
        }
    }
    seeds
}

/// A config, a header and an index as a folder, whose data are zeros, as many as the header wants.
fn model_folder(input: &[u8]) -> String {
    let mut parts = mutate::parts(input).into_iter();
    let mut part = || parts.next().unwrap_or_default();
    let (config, header, index) = (part(), part(), part());
    exercise_folder::exercise_folder(config.clone(), header.len() as u64, header.clone(), index);
    let ends = |value: &serde_json::Value| value["data_offsets"][1].as_u64();
    let header_values: serde_json::Value = serde_json::from_slice(&header).unwrap_or_default();
    let end = header_values.as_object().and_then(|map| map.values().filter_map(ends).max()).unwrap_or(0);
    let weights = exercise_folder::safetensors(header.len() as u64, &header, end.min(4 << 20) as usize);
    match checkpoint::from_files("fuzz", vec![("config.json", config), ("model.safetensors", weights)]) {
        Ok(checkpoint) => use_model(&checkpoint),
        Err(error) => error.to_string(),
    }
}

fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for path in files(&project("crates/engine/tests/data/json"), ".json") {
        let Some(data) = std::fs::read(path).ok().and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok())
        else {
            continue;
        };
        let texts = data["cases"].as_array().into_iter().flatten().filter_map(|case| case["text"].as_str());
        let text: Vec<&str> = texts.take(12).collect();
        let parts = [data["tokenizer"].to_string(), data["config"].to_string(), text.join(" ")];
        seeds.push(parts.map(String::into_bytes).join(BETWEEN));
    }
    seeds
}

/// A `tokenizer.json`, a `tokenizer_config.json` and a text.
fn tokenizer(input: &[u8]) -> String {
    let mut parts = mutate::parts(input).into_iter();
    let mut part = || parts.next().unwrap_or_default();
    let (file, config) = (part(), part());
    let text = String::from_utf8_lossy(&part()).into_owned();
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}".to_vec()),
        ("tokenizer.json", file),
        ("tokenizer_config.json", config),
    ];
    let loaded = checkpoint::from_files("fuzz", files).map_err(|e| e.to_string());
    match loaded.and_then(|checkpoint| Tokenizer::load(&checkpoint).map_err(|e| e.to_string())) {
        Ok(tokenizer) => {
            use_tokenizer(&tokenizer, &text);
            // What is quadratic shows on a long text.
            use_tokenizer(&tokenizer, &text.repeat((200 << 10) / text.len().max(1)));
            format!("ok {} ids", tokenizer.encode(&text, Encode::default()).len().min(20))
        }
        Err(why) => why,
    }
}

fn messages() -> serde_json::Value {
    Message::to_json(&[Message::new("system", "Be brief."), Message::new("user", "Hi"), Message::new("assistant", "")])
}

fn template_seeds() -> Vec<Vec<u8>> {
    let own = std::fs::read(project("crates/engine/tests/data/templates/own.json")).unwrap_or_default();
    let own: serde_json::Value = serde_json::from_slice(&own).unwrap_or_default();
    let sources = own["templates"].as_array().into_iter().flatten().filter_map(|t| t["source"].as_str());
    sources.map(|source| [source.as_bytes(), messages().to_string().as_bytes()].join(BETWEEN)).collect()
}

/// A template and messages.
fn template(input: &[u8]) -> String {
    let mut parts = mutate::parts(input).into_iter();
    let source = String::from_utf8_lossy(&parts.next().unwrap_or_default()).into_owned();
    let given = parts.next().and_then(|part| serde_json::from_slice(&part).ok());
    render(&source, &given.unwrap_or_else(messages))
}

fn render(source: &str, messages: &serde_json::Value) -> String {
    let template = ChatTemplate::new(source, "<s>", "</s>");
    match template.and_then(|template| template.render(&Chat::new(messages))) {
        Ok(text) => format!("ok {}", text.len().min(20)),
        // It was given up, or the engine has failed: both break a promise.
        Err(error @ engine::template::Error::Thread { .. }) => panic!("{error}"),
        Err(error) => error.to_string(),
    }
}

/// Tries grammars in `moebius try-grammar`, which ends what costs too much. Anything else that ends it is a find.
struct Process;

impl Trial for Process {
    fn attempt(&self, message: &str, stopped: &dyn Fn() -> bool) -> Result<(), Error> {
        let setup = |e: std::io::Error| Error::Setup(e.to_string());
        let program = crate::server::program().map_err(Error::Setup)?;
        let mut command = Command::new(program);
        command.arg("try-grammar").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(setup)?;
        let (message, stdin) = (message.to_owned(), child.stdin.take());
        let write = move || stdin.map(|mut stdin| std::io::Write::write_all(&mut stdin, message.as_bytes()));
        let writer = std::thread::spawn(write);
        let begin = Instant::now();
        // Its own limit is on the processor's time: this is for when it sleeps.
        while child.try_wait().map_err(setup)?.is_none() {
            if stopped() || begin.elapsed() > Duration::from_secs(300) {
                let _ = child.kill();
                panic!("a trial does not end");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(writer.join());
        let output = child.wait_with_output().map_err(setup)?;
        let answer = String::from_utf8_lossy(&output.stdout).into_owned();
        let (kind, why) = answer.split_once('\n').unwrap_or_default();
        match kind {
            "ok" => Ok(()),
            "" if is_crash(output.status) => panic!("a trial crashed: {}", output.status),
            "" => Err(Error::TooCostly("it took too much".into())),
            _ => Err(Error::Rule(format!("{kind} {why}"))),
        }
    }
}

/// Whether a process ended by anything but its limits (no memory, no time).
fn is_crash(status: std::process::ExitStatus) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        // Illegal instruction, bus error, bad memory access; a panic is 101.
        matches!(status.signal(), Some(4 | 7 | 11)) || status.code() == Some(101)
    }
    #[cfg(not(unix))]
    {
        !status.success()
    }
}

/// How a tiny model takes images.
static PROCESSOR: LazyLock<Result<Processor, String>> = LazyLock::new(|| {
    let folder = project("crates/conformance/tests/data/images/qwen3_vl_moe/hf");
    let checkpoint = checkpoint::open(&folder).map_err(|e| e.to_string())?;
    let plan = model::build(&checkpoint).map_err(|e| e.to_string())?;
    let seen = model::vision::open(&checkpoint, &plan, None).map_err(|e| e.to_string())?;
    let (_, vision) = seen.ok_or("it sees none")?;
    Processor::open(&checkpoint, &vision, 256).map_err(|e| e.to_string())
});

/// Small images in every format and form of pixels, one turned by its EXIF, and the files of the tests.
fn image_seeds() -> Vec<Vec<u8>> {
    let pixels: Vec<u8> = (0..24 * 18 * 4).map(|i: u32| ((i * i * 7) >> 4) as u8).collect();
    let rgba = image::RgbaImage::from_raw(24, 18, pixels).map(image::DynamicImage::from).unwrap_or_default();
    let forms = [rgba.to_rgb8().into(), rgba.to_rgba16().into(), rgba.to_luma8().into(), rgba];
    let mut seeds = Vec::new();
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
        for form in &forms {
            let mut file = std::io::Cursor::new(Vec::new());
            if form.write_to(&mut file, format).is_ok() {
                seeds.push(file.into_inner());
            }
        }
    }
    let exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0";
    let turned = |file: &Vec<u8>| [&file[..2], &[0xff, 0xe1, 0, 2 + exif.len() as u8], exif, &file[2..]].concat();
    seeds.extend(seeds.iter().find(|file| file.starts_with(&[0xff, 0xd8])).map(turned));
    let files = files(&project("crates/conformance/tests/data/images/qwen3_vl_moe/images"), ".png");
    seeds.extend(files.iter().filter_map(|path| std::fs::read(path).ok()));
    seeds
}

/// A file as an image, and its pixels as a model takes them; of PNG with checksums that are right again, too.
fn image_file(input: &[u8]) -> String {
    let processor = PROCESSOR.as_ref().unwrap_or_else(|why| panic!("{why}"));
    let seen = |file: &[u8]| match Image::decode(file) {
        Ok(image) => {
            assert_eq!(image.pixels.len(), image.width * image.height * 3);
            match processor.rows(&image) {
                Ok(rows) => format!("ok {}", rows.places.len().min(40)),
                Err(error) => error.to_string(),
            }
        }
        Err(error) => error.to_string(),
    };
    let mut whole = input.to_vec();
    let mut at = 8;
    while let Some(length) = whole.get(at..at + 4).filter(|_| input.starts_with(b"\x89PNG")) {
        let length = length.iter().fold(0, |n, &byte| n << 8 | usize::from(byte));
        let Some(data) = whole.get(at + 4..(at + 8).saturating_add(length)) else { break };
        let crc = !data.iter().fold(!0u32, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
        });
        at += 8 + length;
        let Some(sum) = whole.get_mut(at..at + 4) else { break };
        sum.copy_from_slice(&crc.to_be_bytes());
        at += 4;
    }
    if whole == input { seen(input) } else { format!("{}; {}", seen(&whole), seen(input)) }
}

/// The embedded model's vocabulary.
static VOCABULARY: LazyLock<Result<(Arc<Tokenizer>, Grammars), String>> = LazyLock::new(|| {
    let checkpoint = checkpoint::open(&project("models/fable-29m-a10m-q4_k_m.gguf")).map_err(|e| e.to_string())?;
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint).map_err(|e| e.to_string())?);
    let grammars = Grammars::new(tokenizer.clone(), 1).map_err(|e| e.to_string())?;
    Ok((tokenizer, grammars.with_trial(Arc::new(Process))))
});

/// Grammars of the greatest length that recurse, multiply, or come in the worst order.
fn gbnf_seeds() -> Vec<Vec<u8>> {
    let chain = |n: usize, name: fn(usize) -> usize| {
        let rules: String = (1..n).map(|i| format!("r{}::=r{}\n", name(i), name(i - 1))).collect();
        format!("root::=r{}\nr{}::=\"a\"\n{rules}", name(n - 1), name(0))
    };
    let pieces = format!("root ::= \"y\" root | {}\nx ::= {}\n", "x ".repeat(80_000), "\"a\" ".repeat(19_000));
    [chain(14_000, |i| i + 10_000), chain(14_000, |i| 30_000 - i), pieces].map(String::into_bytes).to_vec()
}

/// A grammar in GBNF, translated on a stack that a few hundred levels of recursion fill.
fn gbnf(input: &[u8]) -> String {
    let text = String::from_utf8_lossy(input).into_owned();
    let translate = move || match from_gbnf(&text) {
        Ok(Rule::Regex(rule) | Rule::Lark(rule)) => {
            assert!(rule.len() <= 2 * MAX_RULE_BYTES, "{} bytes out of {}", rule.len(), text.len());
            format!("ok {}", rule.chars().filter(|c| "(|&".contains(*c)).take(12).collect::<String>())
        }
        Ok(other) => panic!("{other:?}"),
        Err(why) => why,
    };
    let thread = std::thread::Builder::new().stack_size(512 << 10).spawn(translate);
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(outcome)) => outcome,
        // The panic is told by who watches.
        Ok(Err(_)) => String::new(),
        Err(error) => panic!("{error}"),
    }
}

/// `schema`, `regex`, `gbnf` or `lark`, and a rule of that kind: compiled, and followed by a model that rolls dice.
fn grammar(input: &[u8]) -> String {
    let mut parts = mutate::parts(input).into_iter();
    let (kind, rule) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let text = String::from_utf8_lossy(&rule).into_owned();
    let rule = match (kind.as_slice(), serde_json::from_slice(&rule)) {
        (b"schema", Ok(schema)) => Rule::JsonSchema(schema),
        (b"schema", Err(error)) => return error.to_string(),
        (b"regex", _) => Rule::Regex(text),
        (b"gbnf", _) => Rule::Gbnf(text),
        _ => Rule::Lark(text),
    };
    let (tokenizer, grammars) = match &*VOCABULARY {
        Ok(vocabulary) => vocabulary,
        Err(why) => panic!("{why}"),
    };
    let constraint = match grammars.compile(&rule, Lead::None) {
        Ok(grammar) => Constraint::new(grammar),
        Err(error) => return error.to_string(),
    };
    let limits = Limits { max_tokens: 8, max_outputs: 1, n_pages: 4, max_positions: 100, ..Limits::default() };
    let n_vocab = tokenizer.n_vocab();
    let dice = Dice { limits, n_vocab, logits: vec![0.0; n_vocab], batch: Batch::default(), picks: Picks::default() };
    let engine = Engine::new(Box::new(dice), tokenizer.clone(), Options::default());
    let sampling = SamplerParams { temperature: 1.0, seed: mutate::hash(input), ..SamplerParams::default() };
    let request = Request { max_new_tokens: 60, sampling, constraint: Some(constraint), ..Request::new(vec![1]) };
    match engine.and_then(|engine| follow(engine, request)) {
        Ok(end) => end,
        Err(error) => error.to_string(),
    }
}

fn follow(mut engine: Engine, request: Request) -> Result<String, engine::scheduler::Error> {
    engine.submit(request)?;
    let mut events = Events::new();
    while engine.step(&mut events)? {
        if let Err(why) = engine.audit() {
            panic!("{why}");
        }
    }
    let end = events.iter().find_map(|event| match event.kind {
        EventKind::Done { reason, .. } => Some(format!("ok {reason:?}")),
        EventKind::Failed(error) => Some(error.to_string()),
        _ => None,
    });
    Ok(end.unwrap_or_else(|| panic!("the request does not end")))
}

/// A model whose logits are a hash of the last token and its position.
struct Dice {
    limits: Limits,
    n_vocab: usize,
    logits: Vec<f32>,
    batch: Batch,
    picks: Picks,
}

impl Program for Dice {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn kinds(&self) -> Kinds {
        Kinds::default()
    }

    fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check(self.limits, self.kinds(), self.n_vocab)?;
        self.batch.copy_from(batch);
        Ok(())
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let last = self.batch.tokens.last().copied().unwrap_or(0);
        let seed = u64::from(last) << 32 | self.batch.chunks.first().map_or(0, |chunk| u64::from(chunk.pos));
        for (id, logit) in self.logits.iter_mut().enumerate() {
            let mut h = (seed ^ (id as u64) << 17).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            h ^= h >> 29;
            *logit = (h.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 22) as f32;
        }
        debug_assert!(self.batch.asks.iter().all(|ask| !matches!(ask, Ask::Hidden)));
        self.picks.fill(&self.batch, &self.logits, self.n_vocab);
        Ok(Output {
            logits: &self.logits,
            picks: &self.picks,
            hidden: &[],
            all_hidden: &[],
            faults: &[],
            routing: None,
        })
    }

    fn copy_state(&mut self, _: u32, _: u32) {}

    fn routers(&self) -> &[RouterInfo] {
        &[]
    }

    fn trace_routing(&mut self, _: bool) {}

    fn stream_stats(&self) -> Option<StreamStats> {
        None
    }

    fn set_interrupt(&mut self, _: Arc<AtomicBool>) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        None
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        None
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        None
    }
}
