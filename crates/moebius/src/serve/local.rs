//! A model in the hands of another program: the server's routes without a network. Its requests are those of clients,
//! so that they mean the same, are checked by the same tables and share the engine's steps; it may let clients in too.

pub mod tokens;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{Request, header};
use axum::response::Response;
use clap::Parser;
use futures_util::StreamExt;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::args::{BackendKind, Cli, Command, CopyArg, EngineArgs, ServeArgs};
use crate::find;
use crate::load::{self, Sequence};
pub use crate::load::{Traced, Wanted};

use super::app::App;
use super::common::{Common, Conversations};
use super::fleet::Fleet;
use super::guard::{Door, Guard};
use super::keys::Keys;
use super::worker::lock;
use super::{Places, Started, http, routes};

/// Fetches a model of Hugging Face's (`ORG/REPO:TYPE`) unless it is on this machine; the path to open.
///
/// # Errors
/// There is none of that name, or it cannot be fetched.
pub fn pull(name: &Path) -> Result<PathBuf> {
    find::resolve_or_pull(name, true)
}

/// A sequence for logits has room for a multiple of so many positions.
const LOGITS_ROOM: usize = 256;

/// A loaded model. Dropping it ends its engine; what runs is cut off.
pub struct Local {
    fleet: Arc<Fleet>,
    app: Arc<App>,
    router: Router,
    /// For its own requests; each server has one too.
    runtime: Runtime,
    path: Option<PathBuf>,
    engine: EngineArgs,
    parallel: usize,
    /// Another program than the engine's, made by the first request for logits.
    sequence: Mutex<Option<Scored>>,
    is_closed: AtomicBool,
    /// What a user should know: where weights are, what was not possible.
    pub notes: Vec<String>,
    /// `CPU avx2`.
    pub backend: String,
    /// The process that has the engine's thread: a fork has none.
    process: u32,
}

/// What a program for logits has room for.
struct Scored {
    sequence: Sequence,
    positions: usize,
}

/// What a model is.
#[derive(Clone, Debug)]
pub struct About {
    /// The name that answers carry.
    pub name: String,
    /// `qwen3moe Q4_K_M`-like.
    pub description: String,
    /// `qwen3moe`.
    pub architecture: String,
    /// `Q4_K_M`, or the weight type that most bytes are in.
    pub file_type: String,
    /// Positions of a prompt and its answer.
    pub context: usize,
    /// Tokens.
    pub vocabulary: usize,
    /// Of all tensors.
    pub parameters: u64,
    /// Of the weights.
    pub bytes: u64,
    /// Whether it is the one that comes with the program.
    pub is_embedded: bool,
    /// Whether it knows conversations.
    pub has_chat_template: bool,
    /// Answers that are computed at a time.
    pub parallel: usize,
    /// Layer, number of experts and number a token of every router, in order of layers.
    pub routers: Vec<(u32, usize, usize)>,
}

impl Local {
    /// Loads the model that flags of `moebius serve` name, the embedded one where none does. Reads neither variables
    /// nor the configuration file.
    ///
    /// # Errors
    /// A flag is wrong, or the model cannot be loaded.
    pub fn open(flags: Vec<OsString>) -> Result<Arc<Local>> {
        let args = parse(flags)?;
        let ServeArgs { chat_template_file, alias, max_queue, sampling, .. } = &args;
        let path = args.models().first().cloned();
        let setup = super::setup(&args, false)?;
        let model = load::open(path.as_deref())?
            .stretched(setup.step.rope_scaling)?
            .with_template(chat_template_file.as_deref())?
            .seeing(&args.sight)?;
        let id = super::names(alias)?.0.unwrap_or_else(|| super::model_name(path.as_deref()));
        let conversations = Conversations::of(&args);
        let mut session = load::start_with(model, &setup)?;
        session.bound_thoughts(conversations.most_thought);
        let sampling = session.sampling(sampling)?;
        let notes = session.placement.iter().chain(&session.warnings).cloned().collect();
        let backend = session.backend.clone();
        let parallel = session.sequences;
        let places = Places { parallel, queue: usize::from(*max_queue) };
        let common = Arc::new(Common::new(crate::trial::process(), conversations));
        let Started { app, thread, .. } = super::start(session, id, sampling, common.clone(), places)?;
        let fleet = Arc::new(Fleet::of_one(common, app.clone(), thread));
        let router = routes::router(fleet.clone(), Arc::default());
        Ok(Arc::new(Local {
            fleet,
            app,
            router,
            runtime: runtime(1)?,
            path,
            engine: args.engine.clone(),
            parallel,
            sequence: Mutex::new(None),
            is_closed: AtomicBool::new(false),
            notes,
            backend,
            process: std::process::id(),
        }))
    }

    /// Returns what the model is.
    pub fn about(&self) -> About {
        let (model, routers) = (&self.app.model, self.app.worker.routing().routers());
        About {
            name: model.id.clone(),
            description: model.description.clone(),
            architecture: model.arch.clone(),
            file_type: model.file_type.clone(),
            context: model.context,
            vocabulary: model.n_vocab,
            parameters: model.n_params,
            bytes: model.size_bytes,
            is_embedded: model.embedded,
            has_chat_template: model.has_template,
            parallel: self.parallel,
            routers: routers.iter().map(|router| (router.layer, router.n_expert, router.n_used)).collect(),
        }
    }

    /// Returns a request to a route, POST where it has a body of JSON. Nothing happens before it is waited for.
    ///
    /// # Errors
    /// The model is closed, or the path is none.
    pub fn call(self: &Arc<Local>, path: &str, body: Option<String>) -> Result<Call> {
        self.check_open()?;
        let request = match body {
            Some(body) => Request::post(path).header(header::CONTENT_TYPE, "application/json").body(Body::from(body)),
            None => Request::get(path).body(Body::empty()),
        };
        let mut request = request.with_context(|| format!("failed to ask {path:?}"))?;
        request.headers_mut().insert(header::HOST, header::HeaderValue::from_static("localhost"));
        let router = self.router.clone();
        let answer = async move { router.oneshot(request).await.unwrap_or_else(|never| match never {}) };
        Ok(Call { state: CallState::Asked(Box::pin(answer)), local: self.clone() })
    }

    /// Logits behind each token of a sequence, in rows of the vocabulary. Tokens with `start` at 0 begin a sequence of
    /// `positions`; others follow what was fed before.
    ///
    /// # Errors
    /// A token is not in the vocabulary, the sequence does not fit, or computing fails.
    pub fn logits(&self, tokens: &[u32], start: usize, positions: usize) -> Result<Vec<f32>> {
        Ok(self.trace(tokens, start, positions, Wanted { logits: true, ..Wanted::default() })?.logits)
    }

    /// The same for all that a model computes at a token: logits, its hidden state, the chosen experts.
    ///
    /// # Errors
    /// As [`Local::logits`].
    pub fn trace(&self, tokens: &[u32], start: usize, positions: usize, wanted: Wanted) -> Result<Traced> {
        self.check_open()?;
        let n_vocab = self.app.model.n_vocab;
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= n_vocab) {
            bail!("failed to compute logits: token {id} is outside the vocabulary of {n_vocab}");
        }
        let mut held = lock(&self.sequence);
        if start == 0 && held.as_ref().is_none_or(|held| held.positions < positions) {
            // The old one goes first: there may be no memory for both.
            *held = None;
            let positions = positions.next_multiple_of(LOGITS_ROOM);
            // As the command `logits`: on the CPU unless a backend is named. What the engine reads from the mapped file
            // is not in memory twice then, as nothing is copied.
            let mut engine = self.engine.clone();
            let is_on_cpu = matches!(engine.backend, None | Some(BackendKind::Cpu));
            let may_stream = engine.step.memory.is_some() && engine.step.copy_weights == CopyArg::Auto;
            if is_on_cpu && !may_stream {
                engine.step.copy_weights = CopyArg::None;
            }
            let model = load::open(self.path.as_deref())?.stretched(engine.step.rope_scaling)?;
            let sequence = Sequence::start(&model, &engine, positions)?;
            *held = Some(Scored { sequence, positions });
        }
        let Some(Scored { sequence, positions }) = held.as_mut() else {
            bail!("failed to compute logits: the sequence has no beginning");
        };
        if start == 0 {
            sequence.rewind();
        }
        if start + tokens.len() > *positions {
            bail!(
                "failed to compute logits: {} tokens were given, there is room for {positions}",
                start + tokens.len()
            );
        }
        sequence.trace(tokens, wanted)
    }

    /// Sequences that the engine computes now, and pages of its cache that are in use.
    pub fn busy(&self) -> (usize, usize) {
        let stats = self.app.worker.stats();
        (stats.running + stats.waiting, stats.pages.used)
    }

    /// Lets clients in at an address. Where keys are given each must send one; on an address beyond this machine they
    /// are needed.
    ///
    /// # Errors
    /// The address cannot be had, a key or an origin is wrong, or keys are missing.
    pub fn serve(self: &Arc<Local>, flags: Vec<OsString>, keys: &str) -> Result<Server> {
        self.check_open()?;
        let args = parse(flags)?;
        let ServeArgs { host, port, allowed_host, cors, .. } = &args;
        let keys = match keys.is_empty() {
            true => Keys::default(),
            false => Keys::parse(keys).map_err(|why| anyhow!("failed to serve: {why}"))?,
        };
        let guard = Guard::new(*host, allowed_host, cors, !keys.is_empty());
        let mut router = routes::router(self.fleet.clone(), Arc::new(Door { guard, keys }));
        if let Some(cors) = super::cors(cors)? {
            router = router.layer(cors);
        }
        let runtime = runtime(2)?;
        let address = (*host, *port);
        let listener = runtime
            .block_on(TcpListener::bind(address))
            .with_context(|| format!("failed to listen on {}:{} (port 0 picks a free one)", address.0, address.1))?;
        let port = listener.local_addr().context("listen")?.port();
        let (stop, stopped) = watch::channel(false);
        let task = runtime.spawn(http::serve(listener, router, stopped, http::Late::Unserved));
        Ok(Server { host: *host, port, stop, task: Some((runtime, task)), _local: self.clone() })
    }

    /// Ends the engine and frees its memory; what runs is cut off, and no request is taken any more.
    ///
    /// # Errors
    /// The engine's thread has failed.
    pub fn close(&self) -> Result<()> {
        if self.is_closed.swap(true, Ordering::AcqRel) || self.process != std::process::id() {
            return Ok(());
        }
        self.fleet.common.drain();
        *lock(&self.sequence) = None;
        self.fleet.stop()
    }

    fn check_open(&self) -> Result<()> {
        if self.process != std::process::id() {
            bail!("failed to use the model: it was loaded before a fork, whose child process must load its own");
        }
        if self.is_closed.load(Ordering::Acquire) {
            bail!("failed to use the model: it is closed");
        }
        Ok(())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // Whoever wants to hear of it calls `close`.
        let _ = self.close();
    }
}

/// What came of waiting for a call.
#[derive(Debug)]
pub enum Got {
    /// Time is up; the call runs on.
    Nothing,
    /// The head of the answer.
    Head {
        /// As in HTTP.
        status: u16,
        /// Names of fields that the route does not know.
        ignored: Option<String>,
    },
    /// A piece of its body.
    Piece(Bytes),
    /// It is complete.
    End,
}

/// A request under way. Dropping it cancels the request.
pub struct Call {
    state: CallState,
    /// Keeps the engine and the runtime; behind the state, which is dropped first.
    local: Arc<Local>,
}

enum CallState {
    Asked(Pin<Box<dyn Future<Output = Response> + Send>>),
    Answered(BodyDataStream),
    Ended,
}

impl Call {
    /// Returns the next thing that happens within `patience`.
    pub fn wait(&mut self, patience: Duration) -> Got {
        let Call { state, local } = self;
        local.runtime.block_on(async {
            match state {
                CallState::Ended => Got::End,
                CallState::Asked(answer) => match tokio::time::timeout(patience, answer).await {
                    Err(_) => Got::Nothing,
                    Ok(response) => {
                        let ignored = response.headers().get("x-ignored-fields");
                        let ignored = ignored.and_then(|names| names.to_str().ok()).map(str::to_string);
                        let status = response.status().as_u16();
                        *state = CallState::Answered(response.into_body().into_data_stream());
                        Got::Head { status, ignored }
                    }
                },
                CallState::Answered(body) => match tokio::time::timeout(patience, body.next()).await {
                    Err(_) => Got::Nothing,
                    Ok(Some(Ok(piece))) => Got::Piece(piece),
                    // Bodies here come out of memory: there is nothing that could fail.
                    Ok(Some(Err(_)) | None) => {
                        *state = CallState::Ended;
                        Got::End
                    }
                },
            }
        })
    }
}

/// Clients are let in while it lives.
pub struct Server {
    host: IpAddr,
    port: u16,
    stop: watch::Sender<bool>,
    task: Option<(Runtime, JoinHandle<()>)>,
    _local: Arc<Local>,
}

impl Server {
    /// Returns where it listens: `http://127.0.0.1:8080`.
    pub fn url(&self) -> String {
        format!("http://{}", std::net::SocketAddr::new(self.host, self.port))
    }

    /// Takes no more requests, waits so long for those that run, and cuts off what still does then.
    pub fn close(&mut self, patience: Duration) {
        let Some((runtime, task)) = self.task.take() else { return };
        // The receiver lives in the task; without one nothing needs telling.
        let _ = self.stop.send(true);
        runtime.block_on(async {
            // What outlasts it is cut off with the runtime.
            let _ = tokio::time::timeout(patience, task).await;
        });
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

fn runtime(threads: usize) -> Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder
        .worker_threads(threads)
        .max_blocking_threads(9)
        .enable_all()
        .build()
        .context("failed to start threads for requests")
}

/// Flags of `moebius serve`; what is wrong with one is told without the advice for command lines.
fn parse(flags: Vec<OsString>) -> Result<ServeArgs> {
    let words = ["moebius", "serve"].into_iter().map(OsString::from).chain(flags);
    match Cli::try_parse_from(words) {
        Ok(Cli { command: Command::Serve(args), .. }) => Ok(args),
        Ok(_) => bail!("failed to read the settings: they belong to another command"),
        Err(said) => {
            let said = said.to_string();
            let first = said.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
            bail!("failed to read the settings: {}", first.lines().map(str::trim).collect::<Vec<_>>().join(" "))
        }
    }
}
