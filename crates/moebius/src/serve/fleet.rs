//! The models of a server: which there are, which are loaded, and who makes room for whom.
//!
//! One model is loaded at the start, stays, and answers to any name. Of several, each is loaded when a request names
//! it, one at a time; what does not fit beside others takes the place of those that nobody uses, the one unused for
//! longest first. A model that cannot be loaded fails the requests that want it, and no others.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use axum::http::StatusCode;
use model::arch::Stretch;
use serde_json::{Value, json};

use super::app::{self, App, ModelInfo};
use super::common::Common;
use super::error::ApiError;
use super::worker::lock;
use super::{Places, Started};
use crate::args::{SamplingArgs, SightArgs, StepArgs};
use crate::device::{Chosen, Held};
use crate::load::{self, EngineSetup, Model, Prepared};
use crate::memory::TooLarge;
use crate::out;

/// How long a model waits for room that others, who are at work, hold.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(50);
/// How often idle models are looked for.
const LOOK_IDLE: Duration = Duration::from_millis(200);
/// Maximum number of names in a message.
const SHOWN: usize = 20;

/// A model that is loaded on demand, and how.
#[derive(Clone)]
pub struct Listed {
    /// Its name in requests.
    pub id: String,
    pub path: PathBuf,
    pub setup: EngineSetup,
    pub sampling: SamplingArgs,
    pub template: Option<PathBuf>,
    pub sight: SightArgs,
    pub places: Places,
}

/// What models that are loaded on demand share.
pub struct Loader {
    /// The promise for the whole process, in bytes.
    pub memory: Option<usize>,
    /// The promise for each GPU.
    pub gpu_memory: Option<usize>,
    /// Bytes that all models may take together where nothing is promised, their files included.
    pub room: Held,
    /// How long a model stays that no request uses; for good when `None`.
    pub idle: Option<Duration>,
}

/// A further name of a model, in which `*` stands for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alias {
    pub name: String,
    pub model: String,
}

/// All models of a server.
pub struct Fleet {
    pub common: Arc<Common>,
    aliases: Vec<Alias>,
    entries: Mutex<Vec<FleetEntry>>,
    /// `None` where the one model is always there.
    loader: Option<Loader>,
    /// Whoever holds it loads a model.
    turn: Arc<tokio::sync::Mutex<()>>,
}

struct FleetEntry {
    info: ModelInfo,
    /// `None` of the one model that is always there.
    listed: Option<Arc<Listed>>,
    state: ModelState,
    last_used: Instant,
}

enum ModelState {
    /// Not loaded; why not, where it was tried last and failed.
    Absent(Option<String>),
    Loading,
    Loaded(Loaded),
}

struct Loaded {
    app: Arc<App>,
    thread: JoinHandle<()>,
    /// Bytes that it takes.
    held: Held,
}

impl Fleet {
    /// Returns a server of one model.
    pub fn of_one(common: Arc<Common>, app: Arc<App>, thread: JoinHandle<()>) -> Fleet {
        let info = app.model.clone();
        let state = ModelState::Loaded(Loaded { app, thread, held: Held::default() });
        let entry = FleetEntry { info, listed: None, state, last_used: Instant::now() };
        Fleet { common, aliases: Vec::new(), entries: Mutex::new(vec![entry]), loader: None, turn: Arc::default() }
    }

    /// Returns a server of several; reads the header of each.
    ///
    /// # Errors
    /// Two have the same name.
    pub fn of_several(common: Arc<Common>, models: Vec<Listed>, loader: Loader) -> Result<Fleet> {
        let mut entries: Vec<FleetEntry> = Vec::with_capacity(models.len());
        for listed in models {
            let Listed { id, path, template, .. } = &listed;
            let same = entries.iter().filter_map(|other| other.listed.as_ref()).find(|other| other.id == *id);
            if let Some(other) = same {
                let (a, b) = (other.path.display(), path.display());
                return Err(anyhow!("failed to serve {a} and {b}: both are named {id}; rename or omit one"));
            }
            let (info, why) = match look(path, id, template.is_some(), listed.setup.step.rope_scaling) {
                Ok(info) => (info, None),
                Err(error) => (ModelInfo { id: id.clone(), ..ModelInfo::default() }, Some(said(&error, path, id))),
            };
            if let Some(why) = &why {
                tracing::warn!(model = id, why, "failed to load a model");
            }
            let listed = Some(Arc::new(listed));
            entries.push(FleetEntry { info, listed, state: ModelState::Absent(why), last_used: Instant::now() });
        }
        common.unloads();
        let entries = Mutex::new(entries);
        Ok(Fleet { common, aliases: Vec::new(), entries, loader: Some(loader), turn: Arc::default() })
    }

    /// Returns the same, whose models have further names.
    ///
    /// # Errors
    /// A name is that of no model.
    pub fn with_aliases(self, aliases: Vec<Alias>) -> Result<Fleet> {
        for Alias { name, model } in &aliases {
            if self.find(Some(model)).is_err() {
                return Err(anyhow!("--alias {name}={model}: no such model; served are {}", self.names().join(", ")));
            }
        }
        Ok(Fleet { aliases, ..self })
    }

    /// Returns the model of a request, loaded if it is not. Without a name it is the first; the only model has any
    /// name.
    ///
    /// # Errors
    /// 404 with the names there are, 503 while the server stops or others hold the memory, 500 with why it cannot be
    /// loaded.
    pub async fn get(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<App>, ApiError> {
        let i = self.find(name)?;
        if let Some(app) = self.loaded(i) {
            return Ok(app);
        }
        tokio::select! {
            () = self.common.drained() => Err(ApiError::stopping()),
            result = self.load_in_turn(i) => result,
        }
    }

    /// Returns the model that was used last, for what is asked without a name.
    pub async fn current(self: &Arc<Self>) -> Result<Arc<App>, ApiError> {
        let last = {
            let entries = lock(&self.entries);
            let loaded = entries.iter().filter_map(|entry| Some((entry.last_used, entry.app()?)));
            loaded.max_by_key(|(last_used, _)| *last_used).map(|(_, app)| app)
        };
        match last {
            Some(app) => Ok(app),
            None => self.get(None).await,
        }
    }

    /// Returns all that are loaded.
    pub fn all_loaded(&self) -> Vec<Arc<App>> {
        lock(&self.entries).iter().filter_map(FleetEntry::app).collect()
    }

    /// Returns whether the engine of every loaded model lives.
    pub fn alive(&self) -> bool {
        lock(&self.entries).iter().filter_map(FleetEntry::app).all(|app| app.worker.alive())
    }

    /// Returns what `tell` says of each model, given its state.
    pub fn list(&self, tell: impl Fn(&ModelInfo, &Value) -> Value) -> Vec<Value> {
        lock(&self.entries).iter().map(|entry| tell(&entry.info(), &entry.status())).collect()
    }

    /// Returns the same of one.
    ///
    /// # Errors
    /// 404 where there is none of this name.
    pub fn tell(&self, name: Option<&str>, tell: impl Fn(&ModelInfo, &Value) -> Value) -> Result<Value, ApiError> {
        let i = self.find(name)?;
        let entries = lock(&self.entries);
        Ok(tell(&entries[i].info(), &entries[i].status()))
    }

    /// Returns whether a model's own name is this.
    pub fn has(&self, name: &str) -> bool {
        lock(&self.entries).iter().any(|entry| entry.info.id == name)
    }

    /// Returns the names of all.
    pub fn names(&self) -> Vec<String> {
        lock(&self.entries).iter().map(|entry| entry.info.id.clone()).collect()
    }

    /// Returns the further names that stand for one name each, with the models that they mean.
    pub fn aliases(&self) -> Vec<(String, String)> {
        let plain = self.aliases.iter().filter(|alias| !alias.name.contains('*'));
        let meant: Vec<_> = plain.filter_map(|alias| Some((&alias.name, self.find(Some(&alias.name)).ok()?))).collect();
        let entries = lock(&self.entries);
        meant
            .into_iter()
            .map(|(name, i)| (name.clone(), entries[i].info.id.clone()))
            .filter(|(name, id)| name != id)
            .collect()
    }

    /// 404 for a name that no model has.
    pub fn unknown(&self, name: &str) -> ApiError {
        let names = self.names();
        let mut list = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
        if names.len() > SHOWN {
            list += &format!(" and {} more (/v1/models)", names.len() - SHOWN);
        }
        let name: String = name.chars().take(100).collect();
        let error = ApiError::new(StatusCode::NOT_FOUND, format!("model not found; served models: {list}"));
        ApiError { code: Some("model_not_found"), param: Some("model".into()), ..error }
            .quoting(format!(" (not {name:?})"))
    }

    /// Ends all engines; what runs is cut off.
    ///
    /// # Errors
    /// The thread of one has failed.
    pub fn stop(&self) -> Result<()> {
        let loaded: Vec<Loaded> = lock(&self.entries).iter_mut().filter_map(FleetEntry::take).collect();
        loaded.iter().for_each(|loaded| loaded.app.worker.stop());
        let failed = loaded.into_iter().filter_map(|loaded| loaded.thread.join().err()).count();
        if failed > 0 { Err(anyhow!("failed to serve: the engine's thread failed")) } else { Ok(()) }
    }

    fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        let entries = lock(&self.entries);
        let Some(name) = name.filter(|_| entries.len() > 1) else { return Ok(0) };
        // Ollama's clients add the tag that goes without saying.
        let short = name.strip_suffix(":latest").unwrap_or(name);
        let ways: [&dyn Fn(&str) -> bool; 3] =
            [&|id| id == name, &|id| id == short, &|id| id.to_lowercase() == short.to_lowercase()];
        let found = ways.iter().find_map(|is| entries.iter().position(|entry| is(&entry.info.id)));
        drop(entries);
        // Names of models come first, and no alias leads to another.
        if found.is_none()
            && let Some(alias) = self.aliases.iter().find(|alias| matches(&alias.name, short))
            && alias.model != name
        {
            return self.find(Some(&alias.model));
        }
        found.ok_or_else(|| self.unknown(name))
    }

    /// Returns a model that is loaded, from now on the one used last.
    fn loaded(&self, i: usize) -> Option<Arc<App>> {
        let mut entries = lock(&self.entries);
        let app = entries[i].app()?;
        entries[i].last_used = Instant::now();
        Some(app)
    }

    async fn load_in_turn(self: &Arc<Self>, i: usize) -> Result<Arc<App>, ApiError> {
        let turn = self.turn.clone().lock_owned().await;
        if let Some(app) = self.loaded(i) {
            return Ok(app);
        }
        // A task of its own: a client that leaves does not end what others wait for.
        let fleet = self.clone();
        let task = tokio::task::spawn_blocking(move || {
            let result = fleet.load(i);
            drop(turn);
            result
        });
        task.await.unwrap_or_else(|error| Err(ApiError::internal(format!("failed to load the model: {error}"))))
    }

    /// Loads a model; called by whoever has the turn, on a thread that may block.
    fn load(self: &Arc<Self>, i: usize) -> Result<Arc<App>, ApiError> {
        let gone = || ApiError::internal("the model is no longer served");
        let loader = self.loader.as_ref().ok_or_else(gone)?;
        let listed = {
            let mut entries = lock(&self.entries);
            let listed = entries[i].listed.clone().ok_or_else(gone)?;
            entries[i].state = ModelState::Loading;
            listed
        };
        let id = &listed.id;
        let start = Instant::now();
        match self.try_load(loader, &listed) {
            Ok(Some((started, held))) => {
                let Started { app, thread, ended } = started;
                tracing::info!(
                    model = id,
                    ms = super::log::ms(start.elapsed()),
                    bytes = held.host,
                    gpu_bytes = held.gpu,
                    "loaded"
                );
                let mut entries = lock(&self.entries);
                entries[i].state = ModelState::Loaded(Loaded { app: app.clone(), thread, held });
                entries[i].last_used = Instant::now();
                drop(entries);
                // An engine that ends by itself is loaded again by the next request.
                let fleet = Arc::downgrade(self);
                tokio::runtime::Handle::current().spawn(async move {
                    let _ = ended.await;
                    let Some(fleet) = fleet.upgrade().filter(|fleet| !fleet.common.draining()) else { return };
                    let mut entries = lock(&fleet.entries);
                    if entries[i].app().is_some_and(|app| !app.worker.alive()) {
                        tracing::error!(model = entries[i].info.id, "the engine's thread has ended");
                        entries[i].take();
                    }
                });
                Ok(app)
            }
            Ok(None) => {
                lock(&self.entries)[i].state = ModelState::Absent(None);
                let why = "busy models hold the memory; try again later";
                Err(ApiError { retry_after: Some(5), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why) })
            }
            Err(error) => {
                let why = said(&error, &listed.path, id);
                tracing::warn!(model = id, why, "failed to load a model");
                lock(&self.entries)[i].state = ModelState::Absent(Some(why.clone()));
                Err(ApiError {
                    param: Some("model".into()),
                    ..ApiError::internal(format!("failed to load {id}: {why}"))
                })
            }
        }
    }

    /// Returns a model and the bytes that it takes; `None` where others hold the room and do not give it back.
    fn try_load(&self, loader: &Loader, listed: &Listed) -> Result<Option<(Started, Held)>> {
        let Listed { id, path, sampling, template, sight, places, .. } = listed;
        let model = load::open(Some(path))?.stretched(listed.setup.step.rope_scaling)?;
        let model = model.with_template(template.as_deref())?.seeing(sight)?.drafting(listed.setup.head())?;
        let Some((setup, prepared)) = self.make_room(loader, &listed.setup, &model)? else { return Ok(None) };
        let mut session = load::start_prepared(model, &setup, prepared)?;
        session.bound_thoughts(self.common.conversations.most_thought);
        session.placement.iter().for_each(|placement| tracing::info!(model = id, "{placement}"));
        session.warnings.iter().for_each(|warning| tracing::warn!(model = id, "{warning}"));
        let sampling = session.sampling(sampling)?;
        let held = session.held;
        let places = Places { parallel: session.sequences, ..*places };
        Ok(Some((super::start(session, id.clone(), sampling, self.common.clone(), places)?, held)))
    }

    /// Returns how a model is loaded into the room that the others leave, or that they leave once those that no request
    /// uses are gone.
    fn make_room(
        &self,
        loader: &Loader,
        wanted: &EngineSetup,
        model: &Model,
    ) -> Result<Option<(EngineSetup, Prepared)>> {
        let wanted = wanted.with_encoder(model.sight.as_ref())?;
        let end = Instant::now() + PATIENCE;
        loop {
            let Beside { is_alone, host, gpu } = self.beside(wanted.device.ordinal);
            let setup = EngineSetup { step: loader.left(&wanted, host, gpu), ..wanted.clone() };
            let is_promise = setup.step.memory.is_some() || setup.step.gpu_memory.is_some();
            match setup.prepare(&model.checkpoint, model.plan.clone()) {
                // What is alone has what there is.
                Ok(prepared) if is_alone => return Ok(Some((setup, prepared))),
                // On the CPU only for want of room on the GPU that others hold.
                Ok(prepared) if setup.device.chosen.is_some() && prepared.device.chosen.is_none() => {}
                Ok(prepared) => {
                    let (held, room) = (prepared.held(setup.encoder), loader.room);
                    let fits = match is_promise {
                        true => prepared.fit.is_roomy(&setup.wish(), model.plan.n_ctx_train),
                        false => {
                            held.host.saturating_add(host) <= room.host && held.gpu.saturating_add(gpu) <= room.gpu
                        }
                    };
                    if fits {
                        return Ok(Some((setup, prepared)));
                    }
                }
                Err(error) if is_alone || !error.is::<TooLarge>() => return Err(error),
                Err(_) => {}
            }
            if !self.unload_one(|_| true) {
                if Instant::now() > end || self.common.draining() {
                    return Ok(None);
                }
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Returns what the models that are loaded take.
    fn beside(&self, ordinal: usize) -> Beside {
        let entries = lock(&self.entries);
        let held = || entries.iter().filter_map(|entry| Some(entry.loaded()?.held));
        Beside {
            is_alone: held().next().is_none(),
            host: held().map(|held| held.host).sum(),
            gpu: held().filter(|held| held.ordinal == ordinal).map(|held| held.gpu).sum(),
        }
    }

    /// Unloads a model as soon as no request uses it; the next request that names it loads it again.
    ///
    /// # Errors
    /// 404 for a name that no model has, 400 where the one model stays.
    pub fn unload(&self, name: Option<&str>) -> Result<(), ApiError> {
        let i = self.find(name)?;
        if self.loader.is_none() {
            let why = "the only model stays loaded; start the server with --sleep-idle-seconds to unload it";
            return Err(ApiError::bad(why));
        }
        self.common.keep(&lock(&self.entries)[i].info.id, Duration::ZERO);
        Ok(())
    }

    /// Unloads models that were idle for as long as they stay, until the server ends.
    pub async fn watch(self: Arc<Self>) {
        while self.loader.is_some() && !self.common.draining() {
            tokio::time::sleep(LOOK_IDLE).await;
            // While a model is loaded, loading makes room.
            let Ok(turn) = self.turn.clone().try_lock_owned() else { continue };
            let fleet = self.clone();
            let task = tokio::task::spawn_blocking(move || {
                while fleet.unload_idle() {}
                drop(turn);
            });
            if let Err(error) = task.await {
                tracing::error!(%error, "failed to unload idle models");
            }
        }
    }

    /// Unloads one model that was idle for as long as it stays; false where there is none.
    fn unload_idle(&self) -> bool {
        let idle = self.loader.as_ref().and_then(|loader| loader.idle);
        let now = Instant::now();
        // What is at work is idle from its end on.
        lock(&self.entries).iter_mut().filter(|entry| !entry.is_idle()).for_each(|entry| entry.last_used = now);
        self.unload_one(|entry| {
            let stays = self.common.kept(&entry.info.id).or(idle);
            stays.is_some_and(|stays| now.saturating_duration_since(entry.last_used) >= stays)
        })
    }

    /// Unloads the model unused for longest of those that are idle and `may` go; false where there is none.
    fn unload_one(&self, may: impl Fn(&FleetEntry) -> bool) -> bool {
        let taken = {
            let mut entries = lock(&self.entries);
            let idle = entries.iter_mut().filter(|entry| entry.is_idle() && may(entry));
            idle.min_by_key(|entry| entry.last_used).and_then(|entry| Some((entry.info.id.clone(), entry.take()?)))
        };
        let Some((id, Loaded { app, thread, .. })) = taken else { return false };
        self.common.forget(&id);
        app.worker.stop();
        drop(app);
        if thread.join().is_err() {
            tracing::error!(model = id, "the engine's thread failed");
        }
        sys::heap::give_back();
        tracing::info!(model = id, "unloaded");
        true
    }
}

/// What others take beside a model: nothing where it is alone.
struct Beside {
    is_alone: bool,
    host: usize,
    /// Of the GPU that the model wants.
    gpu: usize,
}

impl Loader {
    /// Returns what a model may take of the promises besides others that take these bytes of the host and of its GPU.
    /// A promise that a preset makes for its model alone holds too.
    fn left(&self, wanted: &EngineSetup, host: usize, gpu: usize) -> StepArgs {
        let own = wanted.step.gpu_memory;
        let gpu_memory = self.gpu_memory.map(|bytes| bytes.saturating_sub(gpu));
        let gpu_memory = gpu_memory.into_iter().chain(own).min();
        // Without a word about the GPU's memory, the promise of a model on it is about that.
        let is_of_gpu = wanted.device.kind == Chosen::Cuda && gpu_memory.is_none();
        let held = if is_of_gpu { gpu } else { host };
        StepArgs { memory: self.memory.map(|bytes| bytes.saturating_sub(held)), gpu_memory, ..wanted.step }
    }
}

/// Returns whether a text is what a pattern says, in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

impl FleetEntry {
    fn loaded(&self) -> Option<&Loaded> {
        if let ModelState::Loaded(loaded) = &self.state { Some(loaded) } else { None }
    }

    fn app(&self) -> Option<Arc<App>> {
        self.loaded().map(|loaded| loaded.app.clone())
    }

    fn take(&mut self) -> Option<Loaded> {
        self.loaded()?;
        match std::mem::replace(&mut self.state, ModelState::Absent(None)) {
            ModelState::Loaded(loaded) => Some(loaded),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Returns whether it is loaded and idle. Requests get it under the same lock.
    fn is_idle(&self) -> bool {
        self.loaded().is_some_and(|loaded| Arc::strong_count(&loaded.app) == 1 && loaded.app.worker.is_idle())
    }

    /// Returns what is known of it, from its engine where it is loaded.
    fn info(&self) -> ModelInfo {
        self.loaded().map_or_else(|| self.info.clone(), |loaded| loaded.app.model.clone())
    }

    /// Returns its state in llama-server's words.
    fn status(&self) -> Value {
        match &self.state {
            ModelState::Absent(None) => json!({"value": "unloaded"}),
            ModelState::Absent(Some(why)) => json!({"value": "unloaded", "failed": true, "why": why}),
            ModelState::Loading => json!({"value": "loading"}),
            ModelState::Loaded(_) => json!({"value": "loaded"}),
        }
    }
}

/// Returns what a model's header says of it.
fn look(path: &Path, id: &str, has_template: bool, stretch: Option<Stretch>) -> Result<ModelInfo> {
    let Model { checkpoint, plan, .. } = load::open(Some(path))?.stretched(stretch)?;
    let template = engine::folder::chat_template(&checkpoint)?;
    let format = engine::formats::Format::detect(template.as_deref().unwrap_or_default());
    Ok(ModelInfo {
        id: id.into(),
        description: load::describe(&checkpoint, &plan, false),
        arch: plan.arch.to_string(),
        file_type: load::file_type(&checkpoint),
        embedded: false,
        created: app::unix_time(),
        n_params: load::n_params(&checkpoint),
        size_bytes: checkpoint.data_bytes() as u64,
        n_vocab: plan.n_vocab,
        context: plan.n_ctx_train,
        has_template: has_template || template.is_some(),
        has_thoughts: format.thought().is_some(),
        sees_images: false,
        sampling: crate::sampling::of_model(&checkpoint)?,
    })
}

/// Returns why a model cannot be loaded, for clients: they know it by its name, and not where it lies.
fn said(error: &anyhow::Error, path: &Path, id: &str) -> String {
    let text = out::chain(error);
    let full = path.to_string_lossy();
    let folder = path.parent().map(|folder| format!("{}/", folder.display())).filter(|folder| folder.len() > 1);
    let text = text.replace(&*full, id);
    folder.map_or(text.clone(), |folder| text.replace(&folder, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, text, is) in [
            ("claude-*", "claude-opus-4", true),
            ("claude-*", "gpt-5", false),
            ("*", "", true),
            ("gpt", "gpt", true),
            ("gpt", "gpt-5", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("*mini", "gpt-5-mini", true),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, text), is, "{pattern} {text}");
        }
    }
}
