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
mod info;
mod limits;
mod llama;
pub mod local;
mod log;
mod metrics;
mod ollama;
mod openapi;
mod page;
mod parts;
mod prepare;
mod rerank;
mod responses;
mod room;
mod routes;
mod routing;
mod sampling;
mod sse;
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
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use axum::http::{HeaderValue, Method};
use backend::Part;
use engine::sampler::SamplerParams;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::args::{Command, ServeArgs, StepArgs};
use crate::config::Preset;
use crate::device::{self, Prefer};
use crate::load::{self, EngineSetup, Session};
use crate::machine::{self, bytes};
use crate::prompts::Folder;
use crate::{embedded, find};

use app::{App, Keys, ModelInfo};
use common::Common;
use fleet::{Fleet, Listed, Loader};
use guard::{Door, Guard};
use rerank::Reranker;
use worker::Worker;

/// Answers computed at a time when nobody says: of one model, and of each of several.
const DEFAULT_PARALLEL: [usize; 2] = [16, 4];

/// Serves the models of `args`; `presets` say what is different for one of several.
pub fn run(args: &ServeArgs, presets: &[(Preset, Command)]) -> Result<()> {
    log::start(args);
    let keys = match &args.api_key_file {
        None => Keys::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("read keys from {}", path.display()))?;
            Keys::parse(&text).map_err(|why| anyhow!("read keys from {}: {why}", path.display()))?
        }
    };
    let cors = cors(&args.cors)?;
    let paths = paths(args)?;
    let several = paths.len() > 1;
    if several && args.alias.is_some() {
        bail!("serve {} models under one name (--alias): each has that of its file", paths.len());
    }
    let setup = setup(args, several)?;
    let guard = Guard::new(args.host, &args.allowed_host, &args.cors, !keys.is_empty());
    let door = Arc::new(Door { guard, keys });
    let common = Arc::new(Common::new(crate::trial::process()));
    let places = Places { parallel: setup.sequences, queue: usize::from(args.max_queue) };
    let (fleet, ended, summary) = match several {
        true => {
            let resident_bytes = machine::resident_memory();
            let model = |path: PathBuf| {
                let own = presets.iter().find(|(preset, _)| preset.is_for(&path));
                let (id, own) = match own {
                    Some((preset, Command::Serve(own))) => (preset.name.clone(), own),
                    _ => (model_name(Some(&path)), args),
                };
                let setup = self::setup(own, several)?;
                // Promises are those of the server.
                let step = StepArgs { memory: args.engine.step.memory, ..setup.step };
                let setup = EngineSetup { resident_bytes, step, ..setup };
                let places = Places { parallel: setup.sequences, ..places };
                let template = own.chat_template_file.clone();
                Ok(Listed { id, path, setup, sampling: own.sampling.clone(), template, places })
            };
            let StepArgs { memory, gpu_memory, .. } = args.engine.step;
            let loader = Loader { memory, gpu_memory, room: device::free_memory(&setup.device) };
            let fleet = Fleet::of_several(common, paths.into_iter().map(model).collect::<Result<_>>()?, loader)?;
            let names = fleet.names();
            let summary = format!("{} models, loaded when requests name them: {}", names.len(), names.join(", "));
            (fleet, None, summary)
        }
        false => {
            let path = paths.first().map(PathBuf::as_path);
            let model = load::open(path)?.with_template(args.chat_template_file.as_deref())?;
            let id = args.alias.clone().unwrap_or_else(|| model_name(path));
            let session = load::start_with(model, &setup)?;
            let summary = summary(&session);
            session.placement.iter().for_each(|placement| tracing::info!("{placement}"));
            session.warning.iter().for_each(|warning| tracing::warn!("{warning}"));
            let sampling = session.sampling(&args.sampling)?;
            let places = Places { parallel: session.sequences, ..places };
            let Started { app, thread, ended } = start(session, id, sampling, common.clone(), places)?;
            (Fleet::of_one(common, app, thread), Some(ended), summary)
        }
    };
    let fleet = Arc::new(fleet);

    backend::heap::set_up();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build()
        .context("start the server's threads")?;
    let address = std::net::SocketAddr::new(args.host, args.port);
    let result = runtime.block_on(async {
        let listener = match systemd::socket()? {
            Some(listener) => listener,
            None => TcpListener::bind(address)
                .await
                .with_context(|| format!("listen on {address} (--port 0 takes a free one)"))?,
        };
        let address = listener.local_addr().context("listen")?;
        let signals = Signals::new().context("listen for signals")?;
        announce(address, &fleet, &summary, door.keys.is_empty());
        systemd::tell("READY=1");
        tokio::spawn(give_memory_back());
        let router = match cors {
            Some(cors) => routes::router(fleet.clone(), door).layer(cors),
            None => routes::router(fleet.clone(), door),
        };
        serve_until_told(listener, router, &fleet, ended, signals, Duration::from_secs(args.drain_seconds)).await
    });
    fleet.stop()?;
    // Connections that outlive the time they were given are cut off here.
    runtime.shutdown_timeout(Duration::from_secs(1));
    log::flush();
    result
}

/// How a model runs by the flags of a command line.
fn setup(args: &ServeArgs, several: bool) -> Result<EngineSetup> {
    Ok(EngineSetup {
        sequences: args.parallel.map_or(DEFAULT_PARALLEL[usize::from(several)], usize::from),
        fewer_will_do: args.parallel.is_none(),
        cache_tokens: args.cache_tokens,
        requests_bytes: limits::REQUESTS_BYTES,
        prompts: args.cache_dir.clone().map(|path| Folder { path, max_bytes: args.cache_disk as u64 }),
        ..EngineSetup::of(&args.engine, Prefer::Gpu)?
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
    let Session { engine, tokenizer, template, format, template_knows_tools, backend, pooling, .. } = session;
    let reranker = session.reranks.then(|| Reranker::new(&tokenizer, session.rerank_template.as_deref())).flatten();
    let counts_all = backend != "CUDA";
    let metrics = common.metrics.clone();
    let (worker, thread, ended) = Worker::start(engine, places.parallel, places.queue, metrics, counts_all)
        .context("start the engine's thread")?;
    let grammars = std::sync::OnceLock::new();
    let app = App {
        common,
        worker,
        tokenizer,
        template,
        format,
        template_knows_tools,
        model,
        sampling,
        pooling,
        reranker,
        grammars,
    };
    Ok(Started { app: Arc::new(app), thread, ended })
}

/// The models that the command line names.
fn paths(args: &ServeArgs) -> Result<Vec<PathBuf>> {
    let mut paths = args.model.clone();
    // A slip of the pen is told now, and not by the first request. The one model is opened at once.
    for path in args.model.iter().filter(|_| args.model.len() > 1 || args.models.is_some()) {
        let found = find::resolve(path)?;
        std::fs::metadata(&found).with_context(|| format!("open {}", found.display()))?;
    }
    if let Some(folder) = &args.models {
        let named: Vec<PathBuf> = paths.iter().filter_map(|path| path.canonicalize().ok()).collect();
        let is_new = |path: &PathBuf| path.canonicalize().map_or(true, |path| !named.contains(&path));
        paths.extend(find::in_folder(folder)?.into_iter().filter(is_new));
    }
    Ok(paths)
}

/// Serves until a signal comes or the engine's thread ends; then lets what runs finish, within `patience`.
async fn serve_until_told(
    listener: TcpListener,
    router: Router,
    fleet: &Fleet,
    ended: Option<oneshot::Receiver<()>>,
    mut signals: Signals,
    patience: Duration,
) -> Result<()> {
    let (stop, stopped) = watch::channel(false);
    let server = tokio::spawn(http::serve(listener, router, stopped));
    // The engine of the one model; of several each may end, and is loaded again.
    let ended = async {
        match ended {
            Some(ended) => drop(ended.await),
            None => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        told = signals.next() => told.context("listen for signals"),
        _ = ended => Err(anyhow!("serve: the engine's thread has ended")),
    };
    fleet.common.drain();
    systemd::tell("STOPPING=1");
    // The receiver lives in the server's task; without one nothing needs telling.
    let _ = stop.send(true);
    let running: usize = fleet.all_loaded().iter().map(|app| app.worker.stats().running).sum();
    tracing::info!(seconds = patience.as_secs(), running, "stopping");
    tokio::select! {
        _ = server => {}
        () = tokio::time::sleep(patience) => tracing::warn!("time is up; what still runs is cut off"),
        again = signals.next() => {
            again.context("listen for signals")?;
            tracing::warn!("told again; what still runs is cut off");
        }
    }
    result
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
            let _ = tokio::task::spawn_blocking(backend::heap::give_back).await;
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
        })
    }

    /// Returns at the next one.
    async fn next(&mut self) -> std::io::Result<()> {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => Ok(()),
            _ = self.interrupt.recv() => Ok(()),
        }
        #[cfg(not(unix))]
        tokio::signal::ctrl_c().await
    }
}

/// The name that answers carry: the file's, without its folder and ending.
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
        let value = |origin: &String| HeaderValue::from_str(origin).with_context(|| format!("allow origin {origin:?}"));
        AllowOrigin::list(origins.iter().map(value).collect::<Result<Vec<_>>>()?)
    };
    let layer = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]).allow_headers(Any);
    Ok(Some(layer))
}

/// What runs and what it needs, in a few lines.
fn summary(session: &Session) -> String {
    let pages = session.engine.stats().pages.total;
    let positions = pages * backend::PAGE;
    let caches = session.footprint.bytes(|part| matches!(part, Part::Cache | Part::Windows | Part::States));
    format!(
        "{} · {} parameters · {} of weights · {}\ncontext {} · {} answers at a time · cache of {positions} positions, {}",
        session.description,
        machine::count(session.n_params),
        bytes(session.size_bytes),
        session.backend,
        session.engine.context(),
        session.sequences,
        bytes(caches as u64),
    )
}

fn announce(address: std::net::SocketAddr, fleet: &Fleet, summary: &str, is_open: bool) {
    let embedded = fleet.all_loaded().iter().any(|app| app.model.embedded);
    let notice = if embedded { format!("{}\n", embedded::notice()) } else { String::new() };
    let names = fleet.names();
    let has_template = fleet.list(|model, _| model.has_template.into()).first() != Some(&false.into());
    // What a model without a template can do.
    let (route, body) = match has_template {
        true => ("chat/completions", r#""messages": [{"role": "user", "content": "Tell me a story about a fox"}]"#),
        false => ("completions", r#""prompt": "Once upon a time", "max_tokens": 64"#),
    };
    let (title, model) = match names.as_slice() {
        [one] => (one.clone(), String::new()),
        several => {
            let first = several.first().map(|name| Value::from(name.as_str()).to_string()).unwrap_or_default();
            (format!("{} models", several.len()), format!("\"model\": {first}, "))
        }
    };
    // A reader that is gone is no reason to stop.
    let _ = std::io::Write::write_all(
        &mut std::io::stdout(),
        format!(
            "serving {title} on http://{address}\n{summary}\n{notice}\n  \
             http://{address}/ in a browser is a page to chat\n\n  \
             curl http://{address}/v1/{route} -d '{{{model}{body}}}'\n\n",
        )
        .as_bytes(),
    );
    if !address.ip().is_loopback() && is_open {
        tracing::warn!(%address, "listening beyond this machine without --api-key-file: anyone may ask");
    }
}
