//! Log-probabilities of prompts: those that the same tokens have when they are generated, whatever the limits, the
//! company and the cache.

use backend::Limits;
use engine::scheduler::{Options, Request};

use crate::toy::{self, Trouble, answer, drain, prompt, request, roomy, run, sampling};

fn scored(tokens: Vec<u32>, n: usize) -> Request {
    Request { prompt_logprobs: Some(n), max_new_tokens: 0, ..Request::new(tokens) }
}

#[test]
fn a_prompt_scores_as_the_answer_that_it_was() {
    let limits = |max_outputs, max_tokens| Limits { max_outputs, max_tokens, ..roomy() };
    // A text of the model's own, with what it thought of each token.
    let begin = prompt(3, 40);
    let mut engine = toy::engine(roomy(), Options::default(), Trouble::default());
    let told = Request { logprobs: Some(3), sampling: sampling(1.0, 5), ..request(begin.clone(), 5, 50) };
    let (told, _) = run(&mut engine, told);
    let mut text = begin.clone();
    text.extend(&told.tokens[..told.tokens.len() - 1]);
    for (max_outputs, max_tokens, cached, company) in
        [(16, 64, false, 0), (1, 64, false, 0), (2, 64, true, 1), (5, 7, true, 4), (16, 1, false, 3)]
    {
        let mut engine = toy::engine(limits(max_outputs, max_tokens), Options::default(), Trouble::default());
        if cached {
            run(&mut engine, request(text.clone(), 1, 3));
        }
        for seed in 0..company {
            engine.submit(request(prompt(100 + seed, 30), seed, 60)).unwrap();
        }
        let id = engine.submit(scored(text.clone(), 3)).unwrap();
        let (scores, used) = answer(&drain(&mut engine), id);
        engine.audit().unwrap();
        assert_eq!(used.cached_tokens, 0);
        let ids: Vec<u32> = scores.scores.iter().map(|(id, ..)| *id).collect();
        assert_eq!(ids, text[1..], "{max_outputs} rows, {max_tokens} tokens");
        let own = scores.scores[begin.len() - 1..].iter().map(|(_, p, top)| (*p, top.clone()));
        assert!(
            own.eq(told.logprobs[..told.tokens.len() - 1].iter().cloned()),
            "{max_outputs} rows, {max_tokens} tokens"
        );
    }
}

#[test]
fn an_answer_follows_its_scored_prompt() {
    let text = prompt(9, 20);
    let mut engine = toy::engine(roomy(), Options::default(), Trouble::default());
    let plain = request(text.clone(), 2, 12);
    let (expected, _) = run(&mut engine, plain.clone());
    let (scored, _) = run(&mut engine, Request { prompt_logprobs: Some(0), ..plain });
    assert_eq!((scored.tokens, scored.text, scored.end), (expected.tokens, expected.text, expected.end));
    assert_eq!(scored.scores.len(), 19);
    assert!(scored.scores.iter().all(|(_, _, top)| top.is_empty()));
    // One token has nothing before it.
    assert_eq!(run(&mut engine, self::scored(vec![4], 2)).0.scores, []);
}
