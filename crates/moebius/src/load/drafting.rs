//! A smaller model that drafts for another (`--draft FILE`): whether its tokens are the same, and the memory that it
//! takes in addition to that.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use backend::{Backend, Batch, Limits, Program, Tables};
use checkpoint::Checkpoint;
use engine::tokenizer::{TokenKind, Tokenizer};
use model::plan::ValidPlan;

use super::{EngineSetup, Prepared, describe};
use crate::args::DraftArg;
use crate::memory::{self, Fit};
use crate::{find, machine};

/// A model that is to draft, and what computes it.
pub struct Drafting {
    checkpoint: Arc<Checkpoint>,
    /// What it is, as messages call it.
    description: String,
    backend: Box<dyn Backend>,
    /// As the backend lowered it.
    plan: ValidPlan,
    /// Of its program; none before those of the model are known.
    limits: Limits,
    /// Bytes of its program.
    pub bytes: usize,
}

impl Drafting {
    /// Opens the model that is to draft for one of these files, where there is one.
    ///
    /// # Errors
    /// It cannot be found or opened, writes no text, or has other tokens.
    pub(super) fn open(setup: &EngineSetup, main: &Checkpoint) -> Result<Option<Drafting>> {
        let DraftArg::Model(path) = &setup.draft.draft else { return Ok(None) };
        let path = find::resolve(path).context("failed to open the draft model")?;
        let model = super::open(Some(&path)).context("failed to open the draft model")?;
        let name = model.checkpoint.name();
        ensure!(!model.plan.whole, "failed to draft with {name}: it is an embedding model, which writes no text");
        check_tokens(main, &model.checkpoint)?;
        setup.check_cache(&model.plan).with_context(|| format!("failed to draft with {name}"))?;
        let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
        let plan = backend.lower(model.plan)?;
        let description = format!("{name} ({})", describe(&model.checkpoint, &plan, false));
        Ok(Some(Drafting {
            checkpoint: model.checkpoint,
            description,
            backend,
            plan,
            limits: Limits::default(),
            bytes: 0,
        }))
    }

    /// Returns what `prepare` makes of the model with the memory that this one leaves to it. The more the model gets,
    /// the more positions this one is to keep.
    ///
    /// # Errors
    /// As `prepare`.
    pub(super) fn alongside(
        mut self,
        setup: &EngineSetup,
        prepare: impl Fn(&EngineSetup) -> Result<Prepared>,
    ) -> Result<Prepared> {
        /// Halvings of what is left between too little and enough.
        const N_TRIED: usize = 6;
        let prepare_with = |draft_bytes| prepare(&EngineSetup { draft_bytes, ..setup.clone() });
        let (mut low, mut high) = (0, self.takes(&prepare_with(0)?.fit).1);
        let mut prepared = prepare_with(high);
        for _ in 0..N_TRIED {
            if prepared.as_ref().is_ok_and(|prepared| self.takes(&prepared.fit).1 == high) {
                break;
            }
            let middle = low + (high - low) / 2;
            match prepare_with(middle) {
                Ok(found) if self.takes(&found.fit).1 > middle => low = middle,
                found => {
                    high = middle;
                    prepared = if found.is_ok() { found } else { prepared };
                }
            }
        }
        let mut prepared = prepared?;
        (self.limits, self.bytes) = self.takes(&prepared.fit);
        prepared.draft = Some(self);
        Ok(prepared)
    }

    /// Its limits with a model that takes this, and the bytes of such a program.
    fn takes(&self, fit: &Fit) -> (Limits, usize) {
        let limits = memory::limits_alongside(&*self.backend, &self.plan, fit);
        (limits, self.backend.footprint(&self.plan, limits).total())
    }

    /// What it is and what it takes, a sentence.
    pub(super) fn placement(&self) -> String {
        format!("draft model: {}, {} of memory", self.description, machine::bytes(self.bytes as u64))
    }

    /// Returns its program, which has run a step: no answer pays for weights that are read for the first time.
    ///
    /// # Errors
    /// As the backend's.
    pub(super) fn compile(self) -> Result<Box<dyn Program>> {
        let at = || format!("failed to draft with {}", self.description);
        let mut program = self.backend.compile(&self.plan, self.checkpoint, self.limits).with_context(at)?;
        let window_pages = if program.kinds().window.is_some() { &[0][..] } else { &[] };
        let mut batch = Batch::default();
        batch.push(&[0], 0, Tables { pages: &[0], window_pages, first_window_block: 0, state: 0 }, [0]);
        program.submit(&batch).and_then(|()| program.wait().map(|_| ())).with_context(at)?;
        Ok(program)
    }
}

/// Refuses a draft model whose tokens are others. One of the two may have further ones, and what one never uses may be
/// anything.
fn check_tokens(main: &Checkpoint, draft: &Checkpoint) -> Result<()> {
    let load = |checkpoint: &Checkpoint| {
        let name = checkpoint.name().to_string();
        Tokenizer::load(checkpoint).with_context(|| format!("failed to compare the tokens of {name}"))
    };
    let (a, b) = (load(main)?, load(draft)?);
    let n_shared = a.n_vocab().min(b.n_vocab()) as u32;
    let is_used = |id: u32| [&a, &b].iter().all(|tokens| tokens.kind(id) != Some(TokenKind::Unused));
    let Some(id) = (0..n_shared).find(|&id| is_used(id) && a.token_bytes(id) != b.token_bytes(id)) else {
        return Ok(());
    };
    let shown = |tokens: &Tokenizer| String::from_utf8_lossy(tokens.token_bytes(id).unwrap_or_default()).into_owned();
    bail!(
        "failed to draft with {}: its vocabulary is another: token {id} is {:?} there and {:?} in {}",
        draft.name(),
        shown(&b),
        shown(&a),
        main.name()
    )
}
