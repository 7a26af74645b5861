//! A GPU that fails at any call, one that is too small, and sequences of NaN.

use super::*;

/// A GPU that fails at any call gives an error that says so, and nothing runs after it.
#[test]
fn a_gpu_that_fails_is_an_error() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let model = model(SMALL);
    // A step is two lists and a wait: how many steps succeed before.
    for (call, after, n_steps) in [
        (Call::Alloc, 0, 0),
        (Call::Alloc, 2, 0),
        (Call::Build, 0, 0),
        (Call::Build, 9, 0),
        (Call::Submit, 0, 0),
        (Call::Submit, 1, 0),
        (Call::Submit, 2, 1),
        (Call::Wait, 0, 0),
        (Call::Wait, 1, 1),
    ] {
        let options = Options { fault: Some(Fault { call, after }), ..Options::default() };
        let metal = simulated(CacheType::F32, options).unwrap();
        let session = Session::compile(&metal, &model, 32, 32);
        let is_while_compiling = matches!(call, Call::Alloc | Call::Build);
        let mut session = match session {
            Err(CompileError::Memory { .. }) if call == Call::Alloc => continue,
            Err(CompileError::Unsupported { .. }) if call == Call::Build => continue,
            Err(other) => panic!("{call:?} {after}: {other}"),
            Ok(_) if is_while_compiling => panic!("{call:?} {after}: it compiles"),
            Ok(session) => session,
        };
        let (prompt, pages) = (tokens(3, 1), session.pages[0].clone());
        session.batch.push(&prompt, 0, Tables { pages: &pages, ..Tables::default() }, 0..3);
        for _ in 0..n_steps {
            session.program.step(&session.batch).unwrap();
        }
        assert!(!session.program.is_lost());
        for _ in 0..2 {
            let failed = session.program.step(&session.batch).expect_err("it failed, and stays so");
            assert!(failed.to_string().contains("as it was told to be"), "{failed}");
            assert!(session.program.is_lost());
        }
    }
}

/// What a GPU cannot do is refused with the two numbers.
#[test]
fn small_gpus_are_refused() {
    let model = model(SMALL);
    for (options, why) in [
        (Options { family: 5, ..Options::default() }, "family 5"),
        (Options { threads: 32, ..Options::default() }, "32 threads"),
    ] {
        let Some(metal) = simulated(CacheType::F32, options) else { return };
        let refused = Session::compile(&metal, &model, 32, 32).map(drop).unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
    }
    let metal = simulated(CacheType::F32, Options { max_buffer: 1 << 14, ..Options::default() }).unwrap();
    assert!(matches!(Session::compile(&metal, &model, 32, 32).map(drop), Err(CompileError::Memory { .. })));
}

/// A router that sees NaN ends its own sequence only.
#[test]
fn a_sequence_of_nan_ends_alone() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(SMALL);
    let (a, b) = (tokens(4, 1), [1, BAD, 2]);
    let mut exact = Session::new(&Reference, &model, 32);
    let mut found = Session::new(&metal, &model, 32);
    let exact = exact.step_with_faults(&[(0, &a), (1, &b)]);
    let found = found.step_with_faults(&[(0, &a), (1, &b)]);
    assert_eq!((found.faults, found.faults.len()), (exact.faults, 1));
    let n = a.len() * N_VOCAB;
    assert!(relative(&found.logits[..n], &exact.logits[..n]) < 2e-5);
}
