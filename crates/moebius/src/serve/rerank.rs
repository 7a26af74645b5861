//! `/v1/rerank`: how well each of some documents answers a query, by a language model that was trained to say "yes" or
//! "no" to that, as Qwen3-Reranker is, or by an encoder of both texts with a classifier (a cross-encoder). The score of
//! a document is the share of "yes" in the two answers' probabilities, or the logistic function of the classifier's
//! number.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use engine::sampler::SamplerParams;
use engine::scheduler::Request;
use engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Value, json};

use super::app::App;
use super::body::Body;
use super::error::ApiError;
use super::fields::{Field, Kind, Read, field};
use super::limits::{MAX_TEXTS, MAX_TOP_LOGPROBS};
use super::log;
use super::routes::{Answer, Input};
use super::worker::Update;
use super::write::short;
use crate::load::Whole;

const DOCUMENTS: Kind = Kind::List(&Kind::Either(&[Kind::Text, Kind::Object]), MAX_TEXTS);

/// What the route takes.
pub const FIELDS: &[Field] = &[
    field("model", Kind::Text, "model to use; any name if only one is served"),
    field("query", Kind::Text, "search query"),
    field("documents", DOCUMENTS, "list of texts, or of objects with a text"),
    field("texts", DOCUMENTS, "another name of documents"),
    field("top_n", Kind::Int(1, MAX_TEXTS as i128), "number of best documents to return; default all"),
    field("return_documents", Kind::Bool, "also return their texts; default false"),
    field("instruction", Kind::Text, "purpose of the query; default web search"),
    field("cache_salt", Kind::Text, "shares cached prefixes only with requests that have the same salt"),
    field("user", Kind::Text, "ignored"),
];

/// What Qwen3-Reranker is told when nobody says otherwise (its model card).
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";
/// The prompt of Qwen3-Reranker (its model card), where the file has none.
const QWEN: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                    Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                    <|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
                    <|im_start|>assistant\n<think>\n\n</think>\n\n";
/// Added to both answers' logits, so that one of them is chosen.
const FORCED: f32 = 1e4;

/// How a model is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reranker {
    /// With `{instruction}`, `{query}` and `{document}` in it.
    template: String,
    yes: u32,
    no: u32,
}

impl Reranker {
    /// `None` where the vocabulary does not tell the answers apart, or no prompt is known for it.
    pub fn new(tokenizer: &Tokenizer, template: Option<&str>) -> Option<Reranker> {
        // Where a word is several tokens, the first one decides.
        let word = |word: &str| tokenizer.encode(word, Encode::default()).first().copied();
        let is_qwen = || ["<|im_start|>", "<|im_end|>"].iter().all(|mark| tokenizer.token_to_id(mark).is_some());
        let template = template.map(String::from).or_else(|| is_qwen().then(|| QWEN.into()))?;
        let (yes, no) = (word("yes")?, word("no")?);
        (yes != no).then_some(Reranker { template, yes, no })
    }

    /// Returns the prompt of a question, in three pieces: only the outer ones may hold special tokens.
    fn pieces(&self, instruction: &str, query: &str, document: &str) -> [String; 3] {
        const PLACES: [&str; 3] = ["{instruction}", "{query}", "{document}"];
        let template = self.template.as_str();
        let first = PLACES.iter().filter_map(|place| template.find(place)).min().unwrap_or(template.len());
        let last = PLACES.iter().filter_map(|place| Some(template.rfind(place)? + place.len())).max().unwrap_or(0);
        let start = template[..first].rfind('\n').map_or(0, |at| at + 1);
        let (mut rest, mut inner) = (&template[start..last.max(start)], String::new());
        loop {
            let next = PLACES.iter().enumerate().filter_map(|(i, place)| Some((rest.find(place)?, i)));
            let Some((at, i)) = next.min() else { break };
            inner += &rest[..at];
            inner += [instruction, query, document][i];
            rest = &rest[at + PLACES[i].len()..];
        }
        inner += rest;
        [template[..start].into(), inner, template[last.max(start)..].into()]
    }

    /// Returns the tokens of a question; the pieces are cut by themselves, as the model was trained.
    fn prompt(&self, tokenizer: &Tokenizer, instruction: &str, query: &str, document: &str) -> Vec<u32> {
        let mut tokens: Vec<u32> = tokenizer.bos().filter(|_| tokenizer.add_bos()).into_iter().collect();
        for (piece, parse_special) in self.pieces(instruction, query, document).iter().zip([true, false, true]) {
            tokenizer.encode_into(piece, Encode { add_special: false, parse_special }, &mut tokens);
        }
        tokens
    }
}

/// Returns the handler.
pub async fn handle(app: Arc<App>, input: Input) -> Answer {
    let Body { fields: body, mut room, .. } = input.body;
    let by_pairs = app.whole == Some(Whole::Scores);
    if app.reranker.is_none() && !by_pairs {
        let why = "is not a reranker (Qwen3-Reranker and ms-marco-MiniLM are)";
        return Err(ApiError::field("model", why));
    }
    let listed = body.list("documents").or(body.list("texts"));
    let listed = listed.ok_or_else(|| ApiError::field("documents", "is missing"))?;
    let mut documents = Vec::with_capacity(listed.len());
    for (i, document) in listed.iter().enumerate() {
        let text = document.as_str().or_else(|| document.get("text")?.as_str());
        documents
            .push(text.ok_or_else(|| ApiError::field(format!("documents[{i}].text"), "must be a string"))?.to_string());
    }
    let query = body.text("query").unwrap_or_default().to_string();
    let instruction = body.text("instruction").unwrap_or(INSTRUCTION).to_string();
    let salt = body.text("cache_salt").map_or(0, super::sampling::hash);
    let n_bytes = documents.iter().map(|document| document.len() + query.len()).sum();
    let (shared, texts) = (app.clone(), documents.clone());
    let prompts = app.common.heavy(n_bytes, move || {
        let one = |text: &String| {
            [text, &query, &instruction].into_iter().try_for_each(|text| shared.check_length(text))?;
            match &shared.reranker {
                Some(reranker) if !by_pairs => {
                    Ok((reranker.prompt(&shared.tokenizer, &instruction, &query, text), None))
                }
                _ => {
                    let pair = shared.tokenizer.encode_pair(&query, text);
                    let no_pairs = || ApiError::field("model", "has a tokenizer that takes no pairs of texts");
                    pair.map(|(tokens, second)| (tokens, Some(second))).ok_or_else(no_pairs)
                }
            }
        };
        texts.iter().map(one).collect::<Result<Vec<(Vec<u32>, Option<usize>)>, ApiError>>()
    });
    let prompts = prompts.await?;
    let n_tokens: usize = prompts.iter().map(|(tokens, _)| tokens.len()).sum();
    room.hold(n_tokens * size_of::<u32>())?;
    let scores = match &app.reranker {
        Some(reranker) if !by_pairs => {
            let prompts: Vec<&[u32]> = prompts.iter().map(|(tokens, _)| tokens.as_slice()).collect();
            answers(&app, reranker, &prompts, salt).await?
        }
        _ => pairs(&app, prompts).await?,
    };
    let mut results: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    results.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    results.truncate(body.size("top_n").unwrap_or(usize::MAX));
    let with_texts = body.flag("return_documents").unwrap_or(false);
    let result = |&(index, score): &(usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": short(score)});
        if with_texts {
            result["document"] = json!({"text": documents[index]});
        }
        result
    };
    let answer = json!({
        "object": "list",
        "model": app.model.id,
        "results": results.iter().map(result).collect::<Vec<Value>>(),
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    });
    Ok(Json(answer).into_response())
}

/// Returns the share of "yes" after each prompt.
async fn answers(app: &App, reranker: &Reranker, prompts: &[&[u32]], salt: u64) -> Result<Vec<f32>, ApiError> {
    let both = [reranker.yes, reranker.no];
    let all: Vec<(usize, &[u32])> = prompts.iter().copied().enumerate().collect();
    let mut logprobs = vec![[None; 2]; prompts.len()];
    ask(app, &all, &both, salt, &mut logprobs).await?;
    // The other answer is among the likeliest tokens, or it is asked for by itself.
    for (i, &answer) in both.iter().enumerate() {
        let missing: Vec<_> = all.iter().copied().filter(|(at, _)| logprobs[*at][i].is_none()).collect();
        if !missing.is_empty() {
            ask(app, &missing, &[answer], salt, &mut logprobs).await?;
        }
    }
    let share = |[yes, no]: [Option<f32>; 2]| logistic(yes.unwrap_or(f32::MIN) - no.unwrap_or(f32::MIN));
    Ok(logprobs.into_iter().map(share).collect())
}

fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns the scores of pairs: their tokens, and where the second text begins.
async fn pairs(app: &App, pairs: Vec<(Vec<u32>, Option<usize>)>) -> Result<Vec<f32>, ApiError> {
    let mut scores = vec![0.0; pairs.len()];
    if pairs.is_empty() {
        return Ok(scores);
    }
    let request = |(tokens, second)| {
        let mut request = app.request(tokens);
        (request.embedding, request.second) = (Some(app.pooling), second);
        request
    };
    let mut run = app.submit(pairs.into_iter().map(request).collect()).await?;
    while let Some((i, update)) = run.next().await {
        match update {
            Update::Embedding(row) => {
                scores[i] = row.first().map_or(0.0, |&x| logistic(x));
            }
            Update::Done { usage, .. } => log::who().charge(usage.prompt_tokens),
            Update::Failed(message) => return Err(ApiError::internal(message)),
            Update::Unheld(message) => return Err(ApiError::bad(message)),
            Update::Stopped => return Err(ApiError::stopping()),
            Update::Token { .. } | Update::Prompt { .. } => {}
        }
    }
    Ok(scores)
}

/// Writes the log-probabilities of "yes" and "no" behind prompts, as far as they are told: of the answer that is chosen
/// among `answers`, and of the other where it is among the likeliest.
async fn ask(
    app: &App,
    prompts: &[(usize, &[u32])],
    answers: &[u32],
    salt: u64,
    logprobs: &mut [[Option<f32>; 2]],
) -> Result<(), ApiError> {
    if prompts.is_empty() {
        return Ok(());
    }
    let Some(reranker) = &app.reranker else { return Ok(()) };
    let request = |tokens: &[u32]| {
        let mut request = Request::new(tokens.to_vec());
        let logit_bias = answers.iter().map(|&answer| (answer, FORCED)).collect();
        request.sampling = SamplerParams { logit_bias, ..SamplerParams::greedy() };
        request.max_new_tokens = 1;
        request.logprobs = Some(MAX_TOP_LOGPROBS);
        request.cache_salt = salt;
        request
    };
    let mut run = app.submit(prompts.iter().map(|(_, tokens)| request(tokens)).collect()).await?;
    while let Some((i, update)) = run.next().await {
        match update {
            Update::Token { token, logprobs: Some(told), .. } => {
                let at = prompts[i].0;
                for (slot, answer) in logprobs[at].iter_mut().zip([reranker.yes, reranker.no]) {
                    let among = || told.top.iter().find(|(id, _)| *id == answer).map(|(_, value)| *value);
                    *slot = slot.or_else(|| (token == answer).then_some(told.token).or_else(among));
                }
            }
            Update::Failed(message) => return Err(ApiError::internal(message)),
            Update::Unheld(message) => return Err(ApiError::bad(message)),
            Update::Stopped => return Err(ApiError::stopping()),
            Update::Done { usage, .. } => log::who().charge(usage.prompt_tokens + usage.generated),
            Update::Token { .. } | Update::Prompt { .. } | Update::Embedding(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns the pieces of the prompt.
    pub fn pieces(query: &str, document: &str) -> [String; 3] {
        Reranker { template: QWEN.into(), yes: 0, no: 1 }.pieces(INSTRUCTION, query, document)
    }

    #[test]
    fn texts_stand_where_the_template_has_them() {
        let [head, inner, tail] = pieces("a {document}", "b\n{query}");
        assert!(head.ends_with("<|im_start|>user\n") && tail.starts_with("<|im_end|>\n<|im_start|>assistant"));
        assert_eq!(inner, format!("<Instruct>: {INSTRUCTION}\n<Query>: a {{document}}\n<Document>: b\n{{query}}"));
        let plain = Reranker { template: "{query} [SEP] {document}".into(), yes: 0, no: 1 };
        assert_eq!(plain.pieces("", "q", "d"), ["", "q [SEP] d", ""]);
    }
}
