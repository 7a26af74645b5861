//! The scheduler's promises, one by one, on a toy program.

mod toy;

use engine::scheduler::{
    Engine, Error, EventKind, Events, FinishReason, Options, Request, RequestId, SamplerParams, Usage,
};
use toy::*;

/// What a request came to.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    text: String,
    end: Option<Result<FinishReason, Error>>,
    usage: Usage,
}

fn answer(events: &Events, id: RequestId) -> Answer {
    let mut answer = Answer::default();
    for event in events.iter().filter(|e| e.id == id) {
        assert_eq!(answer.end, None, "request {} goes on after its end", id.0);
        match event.kind {
            EventKind::Token { token, text, .. } => {
                answer.tokens.push(token);
                answer.text.push_str(text);
            }
            EventKind::Done { reason, usage } => {
                answer.end = Some(Ok(reason));
                answer.usage = usage;
            }
            EventKind::Failed(error) => answer.end = Some(Err(error.clone())),
        }
    }
    answer
}

fn run(engine: &mut Engine, request: Request) -> Answer {
    let id = engine.submit(request).unwrap();
    answer(&drain(engine), id)
}

/// A prompt of `n` tokens that differs from those of other seeds everywhere.
fn prompt(seed: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (mix(seed, i) % (N_VOCAB as u64 - 1)) as u32 + 1).collect()
}

fn request(seed: u64, n: usize, max_new: usize) -> Request {
    let sampling = SamplerParams { temperature: 1.0, seed, ..Default::default() };
    Request { max_new_tokens: max_new, sampling, ..Request::new(prompt(seed, n)) }
}

fn long(seed: u64, n: usize, max_new: usize) -> Request {
    Request { ignore_eos: true, ..request(seed, n, max_new) }
}

/// The engine's first step's logits are those of the prompt, so greedy tokens follow by hand.
#[test]
fn greedy_tokens_are_the_programs_own() {
    for n in [1, 31, 32, 33, 64, 100] {
        let mut engine = engine(roomy(), Options::default(), Trouble::default());
        let greedy = SamplerParams { temperature: 0.0, ..Default::default() };
        let got = run(&mut engine, Request { sampling: greedy, ..long(5, n, 40) });
        let mut tokens = prompt(5, n);
        for _ in 0..40 {
            let mut row = [0.0; N_VOCAB];
            logits(tokens.iter().enumerate().map(|(p, &t)| (t, p as u32)), &mut row);
            let best = (0..N_VOCAB).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            tokens.push(best as u32);
        }
        assert_eq!(got.tokens, tokens[n..], "prompt of {n}");
        assert_eq!(got.end, Some(Ok(FinishReason::Length)));
        assert_eq!((got.usage.prompt_tokens, got.usage.generated, got.usage.cached_tokens), (n, 40, 0));
    }
}
