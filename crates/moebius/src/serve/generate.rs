//! Answers under way, for all APIs alike: sequences in the engine, their text split into thought, answer and calls,
//! their ends counted. Knows no API's JSON but the two extensions that all share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::formats::{Event, Format, Hold, Parser, Tool};
use engine::scheduler::{FinishReason, Request, Usage};
use engine::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::app::{self, App};
use super::error::ApiError;
use super::fields::Object;
use super::limits::MAX_NUMBERS_BYTES;
use super::log;
use super::parts::{MessagePart, MessageParts};
use super::room::Room;
use super::worker::{RequestRun, TokenLogprobs, Update};

/// What to generate.
pub struct Job {
    /// One a prompt.
    pub requests: Vec<Request>,
    /// Answers for each of them.
    pub n: usize,
    pub parsing: Parsing,
    /// Held for the prompts.
    pub room: Room,
}

/// How an answer's text is split.
#[derive(Clone)]
pub struct Parsing {
    pub format: Format,
    /// Calls are looked for when there are some.
    pub tools: Vec<Tool>,
    /// The prompt ends inside a thought.
    pub opened: bool,
    pub hold: Hold,
}

impl Parsing {
    /// Returns a parsing in which all is content.
    pub fn plain() -> Parsing {
        Parsing { format: Format::PLAIN, tools: Vec::new(), opened: false, hold: Hold::Head }
    }
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Stop,
    /// This stop string did.
    StopString(String),
    /// A limit did, or a call is not complete.
    Length,
    /// It calls tools, and all calls are complete.
    ToolCalls,
}

/// A token with its log-probability.
#[derive(Clone, Debug)]
pub struct Logprob {
    pub token: u32,
    pub values: TokenLogprobs,
}

/// What one update of the engine means for one answer.
#[derive(Debug)]
pub struct Step {
    /// Which answer: prompt · n + choice.
    pub index: usize,
    pub events: Vec<Event>,
    pub logprobs: Vec<Logprob>,
    /// A token of the prompt, when the request wants it; they come before all others.
    pub prompt: Option<Logprob>,
    /// The experts of the token, when the request wants them.
    pub routing: Option<Box<[u16]>>,
    pub finish: Option<Finish>,
}

/// One answer on its way.
struct Choice {
    parser: Parser,
    /// A call is complete.
    called: bool,
    /// A call is not, and never will be.
    is_cut: bool,
    ignore_eos: bool,
    stops: Vec<String>,
    n_prompt: usize,
    /// Tokens that came.
    n_tokens: usize,
    /// It is complete.
    ended: bool,
}

/// Token counts and timings of a request, over all its answers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub prompt: usize,
    pub cached: usize,
    pub generated: usize,
    pub reasoning: usize,
    pub preemptions: usize,
    pub queued: Duration,
    pub prompt_time: Duration,
    pub decode_time: Duration,
}

/// The answers of a request. Dropping it cancels what is not complete.
pub struct Generation {
    run: RequestRun,
    tokenizer: Arc<Tokenizer>,
    choices: Vec<Choice>,
    n: usize,
    request_id: String,
    model: String,
    who: Arc<log::Who>,
    start: Instant,
    pub totals: Totals,
    n_open: usize,
    /// Held for the numbers of tokens.
    numbers: Option<Room>,
    _prompts: Room,
}

impl Generation {
    /// Hands the job to the engine; the first error comes before any token.
    pub async fn start(app: &App, request_id: String, job: Job) -> Result<Generation, ApiError> {
        let Job { requests, n, parsing, mut room } = job;
        let numbers = numbers(app, &requests, n)?;
        let n_tokens: usize = requests.iter().map(|request| request.tokens.len()).sum();
        room.hold(n_tokens * n * size_of::<u32>())?;
        let mut all = Vec::with_capacity(requests.len() * n);
        for request in &requests {
            for i in 0..n as u64 {
                let mut request = request.clone();
                request.sampling.seed = request.sampling.seed.wrapping_add(i);
                all.push(request);
            }
        }
        let choice = |request: &Request| Choice {
            parser: Parser::new(parsing.format, &parsing.tools, parsing.opened, parsing.hold, app::random()),
            called: false,
            is_cut: false,
            ignore_eos: request.ignore_eos,
            stops: request.stop_strings.clone(),
            n_prompt: request.tokens.len(),
            n_tokens: 0,
            ended: false,
        };
        let choices: Vec<Choice> = all.iter().map(choice).collect();
        let n_open = choices.len();
        let run = app.submit(all).await?;
        Ok(Generation {
            run,
            tokenizer: app.tokenizer.clone(),
            choices,
            n,
            request_id,
            model: app.model.id.clone(),
            who: log::who(),
            start: Instant::now(),
            totals: Totals::default(),
            n_open,
            numbers: Some(numbers),
            _prompts: room,
        })
    }

    /// Returns the next thing that happened; `None` when all answers are complete.
    pub async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        let (index, update) = self.run.next().await?;
        Some(self.take(index, update))
    }

    fn take(&mut self, index: usize, update: Update) -> Result<Step, ApiError> {
        let choice = &mut self.choices[index];
        let mut step =
            Step { index, events: Vec::new(), logprobs: Vec::new(), prompt: None, routing: None, finish: None };
        match update {
            Update::Token { token, text, logprobs, routing } => {
                step.routing = routing;
                choice.n_tokens += 1;
                // Marks count as part of the thought that they open or close.
                let was_thought = choice.parser.in_thought();
                choice.parser.push(&text, &mut step.events);
                let is_end = !choice.ignore_eos && self.tokenizer.is_end_of_generation(token);
                // The end is no part of the text, nor are its numbers.
                step.logprobs.extend(logprobs.filter(|_| !is_end).map(|values| Logprob { token, values }));
                choice.look(&step.events);
                self.totals.reasoning += usize::from(was_thought || choice.parser.in_thought());
            }
            Update::Done { reason, usage } => {
                choice.ended = true;
                match reason {
                    FinishReason::Length | FinishReason::ContextFull => choice.parser.cut(&mut step.events),
                    _ => choice.parser.finish(&mut step.events),
                }
                choice.look(&step.events);
                let finish = match reason {
                    FinishReason::Stop | FinishReason::StopString(_) if choice.is_cut => Finish::Length,
                    FinishReason::Stop | FinishReason::StopString(_) if choice.called => Finish::ToolCalls,
                    FinishReason::Stop => Finish::Stop,
                    FinishReason::StopString(i) => {
                        choice.stops.get(i).map_or(Finish::Stop, |stop| Finish::StopString(stop.clone()))
                    }
                    FinishReason::Length | FinishReason::ContextFull => Finish::Length,
                    FinishReason::Cancelled => return Err(ApiError::stopping()),
                };
                step.finish = Some(finish);
                self.n_open -= 1;
                self.totals.add(&usage, index.is_multiple_of(self.n));
            }
            Update::Prompt { token, logprobs } => step.prompt = Some(Logprob { token, values: logprobs }),
            // Only present where there is no answer.
            Update::Embedding(_) => {}
            Update::Failed(message) => return Err(ApiError::internal(message)),
            Update::Unheld(message) => return Err(ApiError::bad(message)),
            Update::Stopped => return Err(ApiError::stopping()),
        }
        Ok(step)
    }

    /// Returns all answers, when they are complete, with the room that is held for their numbers.
    pub async fn collect(mut self) -> Result<(Vec<Collected>, Totals, Option<Room>), ApiError> {
        let mut answers = vec![Collected::default(); self.choices.len()];
        while let Some(step) = self.next().await {
            let step = step?;
            answers[step.index].add(step);
        }
        Ok((answers, self.totals, self.numbers.take()))
    }
}

/// Room for what is kept of each token besides its text: log-probabilities and experts.
fn numbers(app: &App, requests: &[Request], n: usize) -> Result<Room, ApiError> {
    let (mut bytes, mut n_tokens) = (0usize, 0usize);
    for request in requests {
        let alternatives = request.logprobs.map_or(0, |top| size_of::<Logprob>() + top * size_of::<(u32, f32)>());
        let experts =
            if request.routing { size_of::<Box<[u16]>>() + app.worker.routing().bytes_per_token() } else { 0 };
        let tokens = app.worker.room_for(request).saturating_mul(n);
        n_tokens = n_tokens.saturating_add(tokens);
        bytes = bytes.saturating_add(tokens.saturating_mul(alternatives + experts));
        let scores = request.prompt_logprobs.map_or(0, |top| size_of::<Logprob>() + top * size_of::<(u32, f32)>());
        bytes = bytes.saturating_add(request.tokens.len().saturating_mul(n).saturating_mul(scores));
    }
    if bytes > MAX_NUMBERS_BYTES {
        return Err(ApiError::bad(format!(
            "log-probabilities and experts of up to {n_tokens} tokens ({} prompts, {n} answers each) take {bytes} \
             bytes, the limit is {MAX_NUMBERS_BYTES}: ask for fewer tokens, answers or alternatives",
            requests.len(),
        )));
    }
    let mut room = app.common.answers.room();
    room.hold(bytes)?;
    Ok(room)
}

impl Choice {
    /// Notes what the events say about the rest.
    fn look(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::ToolCallEnd { complete: true, .. } => self.called = true,
                Event::ToolCallEnd { complete: false, .. } => self.is_cut = true,
                Event::Reasoning(_)
                | Event::Content(_)
                | Event::ToolCallStart { .. }
                | Event::ToolCallArguments { .. } => {}
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        let Totals { mut prompt, cached, mut generated, preemptions, .. } = self.totals;
        // Answers without an end count as far as they came.
        for (i, choice) in self.choices.iter().enumerate().filter(|(_, choice)| !choice.ended) {
            generated += choice.n_tokens;
            prompt += if i.is_multiple_of(self.n) { choice.n_prompt } else { 0 };
        }
        self.who.charge(prompt + generated);
        let ms = log::ms(self.start.elapsed());
        let (cancelled, model, who) = (self.n_open, &self.model, &self.who);
        let (client, key) = (who.client.map(tracing::field::display), who.key_name());
        tracing::info!(
            request = %self.request_id, model, prompt, cached, generated, preemptions, cancelled, client, key, ms, "finished"
        );
    }
}

impl Totals {
    fn add(&mut self, usage: &Usage, first_of_prompt: bool) {
        if first_of_prompt {
            self.prompt += usage.prompt_tokens;
            self.cached += usage.cached_tokens;
        }
        self.generated += usage.generated;
        self.preemptions += usage.preemptions;
        self.queued = self.queued.max(usage.timings.queued);
        self.prompt_time = self.prompt_time.max(usage.timings.prompt);
        self.decode_time = self.decode_time.max(usage.timings.decode);
    }

    /// Ends an object of OpenAI's text routes: what the answers took, and where the time went.
    pub fn close(&self, object: &mut Object) {
        object.insert("usage".into(), self.openai());
        object.insert("timings".into(), self.timings());
    }

    /// OpenAI's usage.
    fn openai(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        })
    }

    /// Returns where the time went, in llama-server's names.
    pub fn timings(&self) -> Value {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let rate = |n: usize, time: Duration| match time.as_secs_f64() {
            seconds if seconds > 0.0 => (n as f64 / seconds * 10.0).round() / 10.0,
            _ => 0.0,
        };
        let computed = self.prompt - self.cached;
        json!({
            "queued_ms": ms(self.queued),
            "cache_n": self.cached,
            "prompt_n": computed,
            "prompt_ms": ms(self.prompt_time),
            "prompt_per_second": rate(computed, self.prompt_time),
            "predicted_n": self.generated,
            "predicted_ms": ms(self.decode_time),
            // The first token comes out of the prompt's last step.
            "predicted_per_second": rate(self.generated.saturating_sub(1), self.decode_time),
        })
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    pub parts: MessageParts,
    pub logprobs: Vec<Logprob>,
    /// Of the prompt's tokens behind the first, when requested.
    pub prompt: Vec<Logprob>,
    /// Experts by token, when requested.
    pub routing: Vec<Box<[u16]>>,
    pub finish: Option<Finish>,
}

impl Collected {
    fn add(&mut self, step: Step) {
        step.events.into_iter().for_each(|event| self.parts.take(event, |_, _, _| ()));
        self.logprobs.extend(step.logprobs);
        self.prompt.extend(step.prompt);
        self.routing.extend(step.routing);
        self.finish = step.finish.or(self.finish.take());
    }

    /// Returns all its text.
    pub fn content(&self) -> String {
        self.parts
            .list()
            .iter()
            .filter_map(|part| if let MessagePart::Text(t) = part { Some(t.as_str()) } else { None })
            .collect()
    }
}

/// Returns a token's text for logprobs; a part of a character shows as U+FFFD alongside its bytes.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default().to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}
