//! Drafts: recurrent states that move past those that are accepted, and layers for multi-token prediction.

use super::*;
use crate::cuda::{relative_of_most, with_drafts};
use crate::golden::TINY_DRAFTING;

/// Drafts that are right, wrong and right up to a point, among another sequence's and after prompts: whatever was
/// accepted, later tokens see the texts without drafts.
#[test]
fn drafts_agree_with_the_reference() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let plain = Metal { tuning: Tuning { is_plain: true, off: Off::ALL, ..FINE }, ..metal.clone() };
    let metal = Metal { tuning: FINE, ..metal };
    for (metal, shape) in [
        (&metal, SMALL),
        (&metal, SMALL_DELTA),
        (&plain, SMALL_DELTA),
        (&metal, Shape { delta: Some((2, DeltaHeads { sharing: Sharing::Tiled, d_v: 40, ..DELTA })), ..SMALL }),
    ] {
        let run = |backend: &dyn Backend| with_drafts(backend, &model(shape), BAD);
        let begin = Instant::now();
        let error = relative_of_most(&run(metal), &run(&Reference), N_VOCAB);
        println!("{error:.2e}, {:.1?}, {shape:?}", begin.elapsed());
        assert!(error <= 2e-5, "off by {error:e}: {shape:?}");
    }
    // Short convolutions, Mamba-1 and 2, decays by row.
    for name in ["lfm2", "falcon_h1", "kimi_linear", "jamba"] {
        let begin = Instant::now();
        let model = of_file(&metal, &format!("published/{name}/hf"));
        let run = |backend: &dyn Backend| with_drafts(backend, &model, 40);
        let error = relative_of_most(&run(&metal), &run(&Reference), model.0.n_vocab);
        println!("{error:.2e}, {:.1?}, {name}", begin.elapsed());
        assert!(error <= 1e-4, "{name}: off by {error:e}");
    }
}

/// A state that moved past drafts has the bits of one that took the tokens without drafts, where steps have few
/// tokens.
#[test]
fn accepted_drafts_leave_the_bits_of_tokens() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(SMALL_DELTA);
    let text = tokens(12, 4);
    let mut session = Session::new(&metal, &model, 64);
    session.step(&[(0, &text[..2])]);
    session.step_with_drafts(&[(0, &text[2..3], &[text[3], text[4], 0])], &[2]);
    let found = session.step(&[(0, &text[5..7])]).to_vec();
    // As many rows, so that products add up alike.
    let mut plain = Session::new(&metal, &model, 64);
    plain.step(&[(0, &text[..2])]);
    plain.step(&[(0, &text[2..5])]);
    assert_eq!(bits(&found), bits(plain.step(&[(0, &text[5..7])])));
    // A state waits for its drafts to be judged.
    session.step_with_drafts(&[(0, &text[7..8], &text[8..9])], &[0]);
    session.batch.clear();
    let tables = Tables { pages: &[0], state: 1, ..Tables::default() };
    session.batch.push(&[1], 0, tables, [0]);
    session.batch.push_drafts(&[2]);
    session.program.step(&session.batch).unwrap();
    session.batch.clear();
    session.batch.push(&[3], 2, tables, [0]);
    let refused = session.program.step(&session.batch).unwrap_err().to_string();
    assert!(refused.contains("whose drafts are not committed"), "{refused}");
}

/// What the draft head says of the token after the next, and of the one after that; the model next to it computes what
/// it does without.
#[test]
fn heads_that_draft() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    for folder in TINY_DRAFTING {
        let open = || checkpoint::open(&data().join(folder).join("hf")).unwrap();
        let golden = std::fs::read(data().join(folder).join("golden.safetensors")).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let ids: Vec<u32> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
        let numbers = |name: &str| words(name).into_iter().map(f32::from_le_bytes).collect::<Vec<_>>();
        let plan = metal.lower(model::build_drafting(&open()).unwrap()).unwrap().into_plan();
        assert!(plan.draft.is_some());
        let model = (plan, Arc::new(open()));
        for schedule in [Schedule::Forward, Schedule::Random] {
            let metal = Metal { tuning: FINE, ..simulated(CacheType::F32, scheduled(schedule)).unwrap() };
            let mut session = Session::new(&metal, &model, ids.len() + 2);
            for (n, array) in [(1, "mtp_logits"), (2, "mtp_logits_2")] {
                let error = relative(&session.drafts(&ids, n, 5), &numbers(array));
                println!("{folder} {array} {schedule:?}: {error:.2e}");
                assert!(error <= 1e-4, "{folder} {array}: off by {error:e}");
                session.n_past[0] = 0;
            }
            let error = relative(session.step(&[(0, &ids)]), &numbers("logits"));
            assert!(error <= 1e-4, "{folder}: off by {error:e}");
        }
    }
}
