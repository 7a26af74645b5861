//! A backend of three ops, which refuses the others by name: `examples/backend.rs` shows what the contract requires of a
//! backend, and here is proof that nothing else is needed.

// The example's own `main` is not called.
#[allow(dead_code)]
#[path = "../../../../examples/backend.rs"]
mod example;

use backend::reference::Reference;
use backend::{Ask, Backend, Batch, Chunks, StepError, Tables};
use example::{LIMITS, Lookup, N_VOCAB, small_model as model};

#[test]
fn a_small_backend_computes_what_the_reference_does() {
    let (plan, weights) = model(false);
    let compile = |backend: &dyn Backend| {
        let plan = backend.lower(plan.clone()).unwrap();
        backend.compile(&plan, weights.clone(), LIMITS).unwrap()
    };
    let (mut exact, mut found) = (compile(&Reference), compile(&Lookup));
    let mut batch = Batch::default();
    batch.push(&[3, 49, 0], 0, Tables { pages: &[2], ..Tables::default() }, [0, 2]);
    batch.push(&[7; 5], 0, Tables { pages: &[0], ..Tables::default() }, 0..5);
    batch.asks[1] = Ask::Best { n: 4, first_listed: 0, n_listed: 1, mask: None, log_sum_exp: true };
    batch.asks[2] = Ask::Hidden;
    batch.listed.push(11);
    let exact = exact.step(&batch).unwrap();
    let found = found.step(&batch).unwrap();
    assert_eq!(found.logits[..N_VOCAB], exact.logits[..N_VOCAB]);
    assert_eq!(found.logits[3 * N_VOCAB..], exact.logits[3 * N_VOCAB..]);
    assert_eq!(found.picks.get(1), exact.picks.get(1));
    assert_eq!(found.picks.get(1).unwrap().best.len(), 4);
    assert_eq!(found.hidden, exact.hidden);
}

#[test]
fn what_it_lacks_is_refused_by_name() {
    let (plan, weights) = model(true);
    let error = Lookup.compile(&plan, weights, LIMITS).err().unwrap();
    assert_eq!(error.to_string(), "compile plan: backend lookup cannot run softcap");
    let (plan, weights) = model(false);
    let mut program = Lookup.compile(&plan, weights, LIMITS).unwrap();
    let mut batch = Batch::default();
    batch.push(&[50], 0, Tables { pages: &[0], ..Tables::default() }, [0]);
    assert!(matches!(program.step(&batch), Err(StepError::TokenId { token: 0, id: 50, .. })));
    assert!(Chunks::All.contains(3) && !Chunks::NONE.contains(0));
}
