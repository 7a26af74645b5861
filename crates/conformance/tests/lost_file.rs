//! A model file that is cut while a program runs ends the step with an error that names it, and nothing else.

#![allow(clippy::unwrap_used)] // a test may panic in its helpers too

use std::fs;
use std::path::Path;
use std::sync::Arc;

use backend::reference::Reference;
use backend::residency::Policy;
use backend::{Backend, Batch, Cause, Chunks, CompileError, Failure, Limits, StepError, Tables};
use checkpoint::Open;
use cpu::Cpu;

const LIMITS: Limits = Limits {
    max_tokens: 4,
    max_outputs: 4,
    n_pages: 2,
    max_positions: 64,
    n_window_pages: 2,
    n_states: 1,
    max_draft: 0,
};

fn embedded() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf"))
}

/// A batch of one sequence: `tokens` from position 0 on, logits of the last one.
fn batch(tokens: &[u32]) -> Batch {
    let mut batch = Batch::default();
    batch.push(tokens, 0, Tables { pages: &[1], ..Tables::default() }, [tokens.len() - 1]);
    batch
}

#[test]
#[cfg(unix)]
fn a_step_over_a_cut_file_fails_and_names_it() {
    let backends: [(&str, Box<dyn Backend>); 3] = [
        ("cpu", Box::new(Cpu { threads: 2, ..Cpu::default() })),
        ("cpu, dense weights copied", Box::new(Cpu { threads: 2, residency: Policy::CopyDense, ..Cpu::default() })),
        ("reference", Box::new(Reference)),
    ];
    for (name, backend) in backends {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("cut.gguf"), folder.path().join("whole.gguf"));
        fs::copy(embedded(), &path).unwrap();
        fs::copy(embedded(), &other).unwrap();
        let compile = |path: &Path| {
            let checkpoint = Arc::new(checkpoint::open(path).unwrap());
            let plan = backend.lower(model::build(&checkpoint).unwrap()).unwrap();
            backend.compile(&plan, checkpoint, LIMITS).unwrap()
        };
        let (mut program, mut whole) = (compile(&path), compile(&other));
        let batch = batch(&[5, 6, 7]);
        let wanted = program.step(&batch).unwrap().logits.to_vec();

        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        // Again and again: the file does not come back.
        for _ in 0..2 {
            let Err(StepError::Failed(Failure { cause, lost, dirty })) = program.step(&batch) else {
                panic!("{name}: the step went on")
            };
            assert_eq!((lost, dirty), (Chunks::All, Chunks::All), "{name}");
            let Cause::Io { file, why, .. } = &cause else { panic!("{name}: {cause}") };
            assert_eq!(*file, path.display().to_string(), "{name}");
            assert!(why.ends_with("to 4096 bytes while in use"), "{name}: {why}");
        }
        assert_eq!(whole.step(&batch).unwrap().logits, wanted, "{name}");
    }
}

#[test]
#[cfg(unix)]
fn a_cut_file_does_not_compile() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    for residency in [Policy::Mapped, Policy::CopyAll] {
        fs::copy(embedded(), &path).unwrap();
        let backend = Cpu { threads: 2, residency, ..Cpu::default() };
        let checkpoint = Arc::new(checkpoint::open(&path).unwrap());
        let plan = backend.lower(model::build(&checkpoint).unwrap()).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        let error = backend.compile(&plan, checkpoint, LIMITS).map(drop).unwrap_err();
        assert!(matches!(error, CompileError::Read(_)), "{error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn weights_that_are_not_mapped_must_be_copied() {
    let checkpoint = Arc::new(checkpoint::open_with(embedded(), Open { map: false, ..Open::default() }).unwrap());
    let plan = model::build(&checkpoint).unwrap();
    let backends: [Box<dyn Backend>; 2] = [Box::new(Cpu::default()), Box::new(Reference)];
    for backend in backends {
        let error = backend.compile(&plan, Arc::clone(&checkpoint), LIMITS).map(drop).unwrap_err().to_string();
        assert!(error.ends_with("its file is not mapped"), "{error}");
    }
}
