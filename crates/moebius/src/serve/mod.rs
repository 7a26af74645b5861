//! `moebius serve`: models for many clients, over the APIs of OpenAI, Anthropic and Ollama. The only place that knows
//! networks.
//!
//! A request passes the [`guard`] and its route's table ([`routes`], [`body`], [`fields`]), becomes a prompt
//! ([`conversation`]) and a [`generate::Job`], and runs on the engine's thread ([`worker`]); what comes back is written
//! in the API's own words, whole or as a stream ([`sse`], [`mod@write`]).

mod anthropic;
mod app;
mod body;
mod chat;
mod common;
mod completions;
mod conversation;
mod embeddings;
mod error;
mod fields;
mod fill;
mod fleet;
mod form;
mod generate;
mod guard;
mod http;
mod images;
mod info;
mod keys;
mod limits;
mod llama;
pub mod local;
mod log;
mod manage;
mod metrics;
mod ollama;
mod openai;
mod openapi;
mod page;
mod parts;
mod prepare;
mod prompt;
mod rerank;
mod responses;
mod room;
mod routes;
mod routing;
mod sampling;
mod sse;
mod stored;
mod systemd;
mod text;
mod tools;
mod worker;
mod write;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use axum::http::{HeaderValue, Method};
use backend::Part;
use checkpoint::visible;
use engine::sampler::SamplerParams;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::args::{Command, ServeArgs, StepArgs};
use crate::config::Preset;
use crate::device;
use crate::load::{self, EngineSetup, Session, Whole};
use crate::machine::{self, bytes};
use crate::prompts::Folder;
use crate::{embedded, find, input};

pub(crate) use app::random;
use app::{App, ModelInfo};
use common::{Common, Conversations};
use fleet::{Alias, Fleet, Listed, Loader};
use guard::{Door, Guard};
use http::Late;
use keys::Keys;
use rerank::Reranker;
use worker::Worker;

/// Answers computed at a time when nobody says: of one model, and of each of several.
const DEFAULT_PARALLEL: [usize; 2] = [16, 4];

/// Time for the ends of answers that are cut off to reach their clients.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Longest file of keys.
const MAX_KEYS_BYTES: u64 = 1 << 20;

/// Serves the models of `args`; `presets` say what is different for one of several.
pub fn run(args: &ServeArgs, presets: &[(Preset, Command)]) -> Result<()> {
    log::start(args);
    // Before it is read: a change in between is seen as one.
    let stamp = args.api_key_file.as_deref().and_then(stamp);
    let keys = args.api_key_file.as_deref().map(read_keys).transpose()?.unwrap_or_default();
    let cors = cors(&args.cors)?;
    let paths = paths(args)?;
    let several = paths.len() > 1;
    let idle = args.sleep_idle_seconds.map(Duration::from_secs);
    if idle.is_some() && paths.is_empty() {
        bail!("--sleep-idle-seconds requires a model (-m): the built-in one is part of the program");
    }
    let (own_name, aliases) = names(&args.alias)?;
    if several && own_name.is_some() {
        bail!("--alias NAME requires a single model, {} are served; --alias NAME=MODEL names one", paths.len());
    }
    let setup = setup(args, several)?;
    let guard = Guard::new(args.host, &args.allowed_host, &args.cors, !keys.is_empty());
    let door = Arc::new(Door { guard, keys });
    let common = Arc::new(Common::new(crate::trial::process(), Conversations::of(args)));
    let places = Places { parallel: setup.sequences, queue: usize::from(args.max_queue) };
    let (fleet, ended, summary) = match several || idle.is_some() {
        true => {
            let resident_bytes = machine::resident_memory();
            let model = |path: PathBuf| {
                let own = presets.iter().find(|(preset, _)| preset.is_for(&path));
                let (id, own) = match own {
                    Some((preset, Command::Serve(own))) => (preset.name.clone(), own),
                    _ => (own_name.clone().unwrap_or_else(|| model_name(Some(&path))), args),
                };
                let setup = self::setup(own, several)?;
                // Promises are those of the server.
                let step = StepArgs { memory: args.engine.step.memory, ..setup.step };
                let setup = EngineSetup { resident_bytes, step, ..setup };
                let places = Places { parallel: setup.sequences, ..places };
                let template = own.chat_template_file.clone();
                let sight = own.sight.clone();
                Ok(Listed { id, path, setup, sampling: own.sampling.clone(), template, sight, places })
            };
            let StepArgs { memory, gpu_memory, .. } = args.engine.step;
            let loader = Loader { memory, gpu_memory, room: device::free_memory(&setup.device), idle };
            let fleet = Fleet::of_several(common, paths.into_iter().map(model).collect::<Result<_>>()?, loader)?;
            let names = fleet.names();
            let shown: Vec<_> = names.iter().map(|name| visible(name)).collect();
            let summary = match (several, args.sleep_idle_seconds) {
                (false, Some(seconds)) => format!("unloaded after {seconds} s without a request"),
                _ => format!("{} models, loaded when requests name them: {}", names.len(), shown.join(", ")),
            };
            (fleet, None, summary)
        }
        false => {
            let path = paths.first().map(PathBuf::as_path);
            let model = load::open(path)?
                .stretched(setup.step.rope_scaling)?
                .with_template(args.chat_template_file.as_deref())?
                .seeing(&args.sight)?;
            let id = own_name.unwrap_or_else(|| model_name(path));
            let mut session = load::start_with(model, &setup)?;
            session.bound_thoughts(common.conversations.most_thought);
            let summary = summary(&session);
            session.placement.iter().for_each(|placement| tracing::info!("{placement}"));
            session.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            let sampling = session.sampling(&args.sampling)?;
            let places = Places { parallel: session.sequences, ..places };
            let Started { app, thread, ended } = start(session, id, sampling, common.clone(), places)?;
            (Fleet::of_one(common, app, thread), Some(ended), summary)
        }
    };
    let fleet = Arc::new(fleet.with_aliases(aliases)?);

    sys::heap::set_up();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(9)
        .enable_all()
        .build()
        .context("failed to start the server's threads")?;
    let address = std::net::SocketAddr::new(args.host, args.port);
    let served = runtime.block_on(async {
        let (listener, late) = match systemd::socket()? {
            // It holds connections until the server is started again.
            Some(listener) => (listener, Late::Unserved),
            None => {
                let listener = TcpListener::bind(address).await;
                let what = || format!("failed to listen on {address} (--port 0 picks a free one)");
                (listener.with_context(what)?, Late::Told)
            }
        };
        let address = listener.local_addr().context("listen")?;
        let signals = Signals::new().context("failed to listen for signals")?;
        if idle.is_some() && !several {
            // What is wrong with the one model is told at the start.
            fleet.get(None).await.map_err(|error| anyhow!("{}", error.message))?;
        }
        tokio::spawn(fleet.clone().watch());
        if let (Some(path), Some(stamp)) = (args.api_key_file.clone(), stamp) {
            tokio::spawn(watch_keys(path, stamp, door.clone()));
        }
        announce(address, &fleet, &summary, door.keys.is_empty());
        systemd::tell("READY=1");
        tokio::spawn(give_memory_back());
        let router = match cors {
            Some(cors) => routes::router(fleet.clone(), door).layer(cors),
            None => routes::router(fleet.clone(), door),
        };
        let patience = Duration::from_secs(args.drain_seconds);
        anyhow::Ok(serve_until_told(listener, late, router, &fleet, ended, signals, patience).await)
    });
    let stopped = fleet.stop();
    let result = served.and_then(|(result, connections)| {
        // What is cut off is told so, and its client reads that.
        if !connections.is_finished() {
            let _ = runtime.block_on(async { tokio::time::timeout(LAST_WORDS, connections).await });
        }
        result
    });
    // Connections that outlive the time they were given are cut off here.
    runtime.shutdown_timeout(Duration::from_secs(1));
    log::flush();
    stopped.and(result)
}

/// Returns how a model runs by the flags of a command line.
fn setup(args: &ServeArgs, several: bool) -> Result<EngineSetup> {
    Ok(EngineSetup {
        sequences: args.parallel.map_or(DEFAULT_PARALLEL[usize::from(several)], usize::from),
        fewer_will_do: args.parallel.is_none(),
        step_time: args.step_time.map(|ms| Duration::from_millis(ms.into())),
        cache_tokens: args.cache_tokens,
        requests_bytes: limits::REQUESTS_BYTES + args.store_responses.unwrap_or(0),
        prompts: args.cache_dir.clone().map(|path| Folder { path, max_bytes: args.cache_disk as u64 }),
        ..EngineSetup::drafting(&args.engine, args.draft.clone())?
    })
}

/// How many answers there may be at a time.
#[derive(Clone, Copy, Debug)]
struct Places {
    /// Computed.
    parallel: usize,
    /// Waiting beyond those.
    queue: usize,
}

/// A model whose engine runs.
struct Started {
    app: Arc<App>,
    thread: JoinHandle<()>,
    /// Hears when the engine's thread has ended.
    ended: oneshot::Receiver<()>,
}

fn start(
    session: Session,
    id: String,
    sampling: SamplerParams,
    common: Arc<Common>,
    places: Places,
) -> Result<Started> {
    let model = ModelInfo {
        id,
        context: session.engine.context(),
        has_template: session.template.is_some(),
        has_thoughts: session.format.thought().is_some(),
        sees_images: session.eyes.is_some(),
        sampling: sampling.clone(),
        description: session.description,
        arch: session.arch,
        file_type: session.file_type,
        embedded: session.embedded,
        created: app::unix_time(),
        n_params: session.n_params,
        size_bytes: session.size_bytes,
        n_vocab: session.n_vocab,
    };
    let Session { engine, tokenizer, template, format, template_knows_tools, backend, pooling, eyes, .. } = session;
    let reranker = session.reranks.then(|| Reranker::new(&tokenizer, session.rerank_template.as_deref())).flatten();
    let counts_all = backend != "CUDA";
    let metrics = common.metrics.model(&model.id);
    let (worker, thread, ended) = Worker::start(engine, places.parallel, places.queue, metrics, counts_all)
        .context("failed to start the engine's thread")?;
    let grammars = std::sync::OnceLock::new();
    let app = App {
        common,
        worker,
        tokenizer,
        template,
        format,
        template_knows_tools,
        template_knows_effort: session.template_knows_effort,
        model,
        sampling,
        pooling,
        whole: session.whole,
        eyes,
        reranker,
        grammars,
    };
    Ok(Started { app: Arc::new(app), thread, ended })
}

/// Returns the models that the command line names.
fn paths(args: &ServeArgs) -> Result<Vec<PathBuf>> {
    let named = args.models();
    let pulled = |path: &PathBuf| if args.pull { find::resolve_or_pull(path, true) } else { Ok(path.clone()) };
    let mut paths = named.iter().map(pulled).collect::<Result<Vec<_>>>()?;
    // A slip of the pen is told now, and not by the first request. The one model is opened at once.
    for path in paths.iter().filter(|_| named.len() > 1 || args.models.is_some()) {
        let found = find::resolve(path)?;
        std::fs::metadata(&found).with_context(|| format!("failed to open {}", found.display()))?;
    }
    if let Some(folder) = &args.models {
        let named: Vec<PathBuf> = paths.iter().filter_map(|path| path.canonicalize().ok()).collect();
        let is_new = |path: &PathBuf| path.canonicalize().map_or(true, |path| !named.contains(&path));
        // What is named must be right; of what a folder happens to hold, one of a name is left out.
        for path in find::in_folder(folder)?.into_iter().filter(is_new) {
            let name = model_name(Some(&path));
            match paths.iter().find(|other| model_name(Some(other)) == name) {
                Some(other) => tracing::warn!(
                    path = %path.display(), other = %other.display(), "a model is left out: another has its name"
                ),
                None => paths.push(path),
            }
        }
    }
    Ok(paths)
}

/// Serves until a signal comes or the engine's thread ends; then lets what runs finish, within `patience`. Returns what
/// still serves connections, too.
async fn serve_until_told(
    listener: TcpListener,
    late: Late,
    router: Router,
    fleet: &Fleet,
    ended: Option<oneshot::Receiver<()>>,
    mut signals: Signals,
    patience: Duration,
) -> (Result<()>, tokio::task::JoinHandle<()>) {
    let (stop, stopped) = watch::channel(false);
    let mut server = tokio::spawn(http::serve(listener, router, stopped, late));
    // The engine of the one model; of several each may end, and is loaded again.
    let ended = async {
        match ended {
            Some(ended) => drop(ended.await),
            None => std::future::pending().await,
        }
    };
    let mut result = tokio::select! {
        told = signals.next() => told.context("failed to listen for signals"),
        _ = ended => Err(anyhow!("failed to serve: the engine's thread ended")),
    };
    fleet.common.drain();
    systemd::tell("STOPPING=1");
    // The receiver lives in the server's task; without one nothing needs telling.
    let _ = stop.send(true);
    let running: usize = fleet.all_loaded().iter().map(|app| app.worker.stats().running).sum();
    let seconds = patience.as_secs();
    tracing::info!(seconds, running, "shutting down: {running} requests running, waiting at most {seconds} s");
    tokio::select! {
        _ = &mut server => {}
        () = tokio::time::sleep(patience) => tracing::warn!("shutdown time is over: cutting off running requests"),
        again = signals.next() => {
            tracing::warn!("second signal: cutting off running requests");
            result = result.and(again.context("failed to listen for signals"));
        }
    }
    (result, server)
}

/// Reads a file of keys.
fn read_keys(path: &Path) -> Result<Keys> {
    let what = || format!("failed to read keys from {}", path.display());
    let text = input::short(path, MAX_KEYS_BYTES).with_context(what)?;
    Keys::parse(&text).map_err(|why| anyhow!("{}: {why}", what()))
}

/// By what a change of a file is seen: time and length.
type Stamp = (SystemTime, u64);

/// Returns the stamp of a file; none for what is no file, as a pipe, which is read once.
fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((meta.modified().ok()?, meta.len()))
}

/// Takes the keys of a file again whenever its stamp is another than what was `seen`; what cannot be read leaves those
/// that were.
async fn watch_keys(path: PathBuf, mut seen: Stamp, door: Arc<Door>) {
    const LOOK: Duration = Duration::from_secs(1);
    loop {
        tokio::time::sleep(LOOK).await;
        let (file, before) = (path.clone(), seen);
        let look = move || {
            let now = stamp(&file).filter(|now| *now != before)?;
            Some((now, read_keys(&file)))
        };
        let Ok(Some((now, keys))) = tokio::task::spawn_blocking(look).await else { continue };
        seen = now;
        match keys {
            Ok(keys) => tracing::info!(keys = door.keys.replace(keys), "the file of keys has changed: read again"),
            Err(error) => {
                let why = crate::out::chain(&error);
                tracing::warn!(why, "the file of keys has changed: keeping the keys that were");
            }
        }
    }
}

/// Gives memory back that requests took and freed. Where that frees little, because it is in use, the next look comes
/// later.
async fn give_memory_back() {
    const SOON: Duration = Duration::from_secs(2);
    const LATE: Duration = Duration::from_secs(60);
    const MUCH: usize = 8 << 20;
    let resident = || machine::resident_memory().unwrap_or(0);
    let start = resident();
    let (mut seen, mut nap, mut slept) = (start, SOON, Duration::ZERO);
    loop {
        tokio::time::sleep(SOON).await;
        slept += SOON;
        let now = resident();
        if now.abs_diff(seen) > MUCH {
            nap = SOON;
        }
        if now > start + 2 * MUCH && slept >= nap {
            // It takes a lock that allocations need, for a moment: not on a thread that serves connections.
            let _ = tokio::task::spawn_blocking(sys::heap::give_back).await;
            seen = resident();
            nap = if seen + MUCH / 2 > now { (2 * nap).min(LATE) } else { SOON };
            slept = Duration::ZERO;
        }
    }
}

/// What tells the server to stop: Ctrl-C, or the system. Heard from the moment it is made.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    /// The terminal is gone; none where the server was started to outlive it.
    #[cfg(unix)]
    hang_up: Option<tokio::signal::unix::Signal>,
    #[cfg(windows)]
    interrupt: tokio::signal::windows::CtrlC,
    #[cfg(windows)]
    stop: tokio::signal::windows::CtrlBreak,
    /// The console is gone.
    #[cfg(windows)]
    close: tokio::signal::windows::CtrlClose,
    /// The machine goes down.
    #[cfg(windows)]
    shutdown: tokio::signal::windows::CtrlShutdown,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        #[cfg(unix)]
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            #[cfg(unix)]
            terminate: signal(SignalKind::terminate())?,
            #[cfg(unix)]
            interrupt: signal(SignalKind::interrupt())?,
            #[cfg(unix)]
            hang_up: match machine::ignores_hang_up() {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
            #[cfg(windows)]
            interrupt: tokio::signal::windows::ctrl_c()?,
            #[cfg(windows)]
            stop: tokio::signal::windows::ctrl_break()?,
            #[cfg(windows)]
            close: tokio::signal::windows::ctrl_close()?,
            #[cfg(windows)]
            shutdown: tokio::signal::windows::ctrl_shutdown()?,
        })
    }

    /// Returns at the next one.
    async fn next(&mut self) -> std::io::Result<()> {
        #[cfg(unix)]
        {
            let hang_up = async {
                match &mut self.hang_up {
                    Some(signal) => signal.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = self.terminate.recv() => Ok(()),
                _ = self.interrupt.recv() => Ok(()),
                _ = hang_up => Ok(()),
            }
        }
        #[cfg(windows)]
        {
            tokio::select! {
                _ = self.interrupt.recv() => Ok(()),
                _ = self.stop.recv() => Ok(()),
                _ = self.close.recv() => Ok(()),
                _ = self.shutdown.recv() => Ok(()),
            }
        }
        #[cfg(not(any(unix, windows)))]
        tokio::signal::ctrl_c().await
    }
}

/// Returns what `--alias` says: the name of the one model, and further names of models.
fn names(aliases: &[String]) -> Result<(Option<String>, Vec<Alias>)> {
    let (mut own, mut further) = (None, Vec::new());
    for alias in aliases {
        match alias.split_once('=') {
            Some((name, model)) if !name.is_empty() && !model.is_empty() => {
                further.push(Alias { name: name.into(), model: model.into() });
            }
            Some(_) => bail!("--alias {alias}: write NAME=MODEL"),
            None if own.is_some() => bail!("--alias NAME may be given once; NAME=MODEL gives further names"),
            None => own = Some(alias.clone()),
        }
    }
    Ok((own, further))
}

/// Returns the name that answers carry: the file's, without its folder and ending.
fn model_name(path: Option<&Path>) -> String {
    let stem = path.and_then(|path| path.file_stem()).map(|stem| stem.to_string_lossy().into_owned());
    stem.unwrap_or_else(|| "fable-29m-a10m".into())
}

/// Cross-origin rules; none unless configured.
fn cors(origins: &[String]) -> Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let value = |origin: &String| {
            HeaderValue::from_str(origin).with_context(|| format!("failed to allow origin {origin:?}"))
        };
        AllowOrigin::list(origins.iter().map(value).collect::<Result<Vec<_>>>()?)
    };
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]).allow_headers(Any);
    Ok(Some(layer))
}

/// Returns a few lines about the model and its memory.
fn summary(session: &Session) -> String {
    let pages = session.engine.stats().pages.total;
    let positions = pages * backend::PAGE;
    let caches = session.footprint.bytes(|part| matches!(part, Part::Cache | Part::Windows | Part::States));
    format!(
        "{} · {} parameters · {} of weights · {}\n\
         {} · up to {} requests at once · KV cache for {} tokens, at most {}",
        session.description,
        machine::count(session.n_params),
        bytes(session.size_bytes),
        session.backend,
        session.context(),
        session.sequences,
        grouped(positions),
        bytes(caches as u64),
    )
}

/// Returns a number with a comma between groups of three digits.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let groups = (first..digits.len()).step_by(3).map(|at| &digits[at..at + 3]);
    let head = (first > 0).then(|| &digits[..first]);
    head.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// Returns a text as JSON that is placed between a shell's single quotation marks, of characters that can be seen.
fn json_in_quotes(text: &str) -> String {
    crate::out::json(&Value::from(text).to_string()).replace('\'', "\\u0027")
}

fn announce(address: std::net::SocketAddr, fleet: &Fleet, summary: &str, is_open: bool) {
    let embedded = fleet.all_loaded().iter().any(|app| app.model.embedded);
    let notice = if embedded { format!("{}\n", embedded::notice()) } else { String::new() };
    let names: Vec<String> = fleet.names().iter().map(|name| visible(name)).collect();
    let has_template = fleet.list(|model, _| model.has_template.into()).first() != Some(&false.into());
    let whole = fleet.all_loaded().first().and_then(|app| app.whole);
    // What the model can do.
    let (route, body) = match has_template {
        _ if whole == Some(Whole::Vectors) => ("embeddings", r#""input": ["The fox", "A dog"]"#),
        _ if whole.is_some() => ("rerank", r#""query": "What is a fox?", "documents": ["An animal", "A tool"]"#),
        true => ("chat/completions", r#""messages": [{"role": "user", "content": "Tell me a story about a fox"}]"#),
        false => ("completions", r#""prompt": "Once upon a time", "max_tokens": 64"#),
    };
    // Any address is ours; a browser asks for one.
    let (here, there) = match address.ip().is_unspecified() {
        true => {
            let other = machine::lan_address().map(|ip| std::net::SocketAddr::new(ip, address.port()));
            (std::net::SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), address.port()), other)
        }
        false => (address, None),
    };
    let there = there.map(|there| format!(", and http://{there}/ on other machines")).unwrap_or_default();
    let page = match whole {
        None => format!("\n  http://{here}/ in a browser is a page to chat{there}\n"),
        Some(_) => String::new(),
    };
    let (title, model) = match names.as_slice() {
        [one] => (one.clone(), String::new()),
        several => {
            // What the line quotes for a shell ends at its quotation mark: JSON has other words for that.
            let first = fleet.names().first().map(|name| json_in_quotes(name)).unwrap_or_default();
            (format!("{} models", several.len()), format!("\"model\": {first}, "))
        }
    };
    // A reader that is gone is no reason to stop.
    let _ = crate::out::line(&format!(
        "serving {title} on http://{address}\n{summary}\n{notice}{page}\n  \
         curl http://{here}/v1/{route} -d '{{{model}{body}}}'\n",
    ));
    if !address.ip().is_loopback() && is_open {
        let why = "listening on a public address without API keys: anyone who reaches it can use it (--api-key-file)";
        tracing::warn!(%address, "{why}");
    }
}
