//! From a conversation to a request for the engine: what the three conversation APIs share.

use std::sync::Arc;

use engine::formats::Hold;
use engine::scheduler::Request;
use serde_json::Value;

use super::app::App;
use super::conversation::{Conversation, Fits};
use super::error::ApiError;
use super::fields::{Field, Kind, Object, Read, field};
use super::form::{self, AnswerForm, Constrained};
use super::generate::Parsing;
use super::sampling;
use super::tools::{Dialects, ToolChoice};

const BUDGET: Kind = Kind::Int(-1, 1 << 31);

/// Fields of all conversations besides the sampling.
pub const FIELDS: &[Field] = &[
    field("thinking_budget", BUDGET, "maximum number of tokens of the model's thought; -1 for no limit"),
    field("reasoning_budget", BUDGET, "llama.cpp's name of thinking_budget"),
];

/// Tokens of a thought by OpenAI's `reasoning_effort`, for models whose template has no variable for it; others think
/// without limit.
const EFFORTS: &[(&str, usize)] = &[("none", 0), ("minimal", 128), ("low", 1024), ("medium", 4096)];

/// What a client wants of the answer's form.
#[derive(Clone, Debug, Default)]
pub struct AnswerWish {
    pub choice: ToolChoice,
    pub form: Option<AnswerForm>,
    /// Whether the client expects several calls, if it says so.
    pub parallel: Option<bool>,
    /// Maximum number of tokens of a thought.
    pub most_thought: Option<usize>,
}

/// A request for the engine, and how its answer is read and told.
pub struct Prepared {
    pub request: Request,
    pub parsing: Parsing,
    pub dialects: Dialects,
    /// What of the client's request has no effect.
    pub ignored: Vec<String>,
}

/// Returns the request of a conversation, with the sampling of the body, and how to read its answer.
pub async fn prepare(
    app: &Arc<App>,
    mut conversation: Conversation,
    wanted: AnswerWish,
    body: &Object,
) -> Result<Prepared, ApiError> {
    wanted.choice.check(&conversation.tools)?;
    if wanted.choice == ToolChoice::None {
        conversation.tools.clear();
    }
    let format = app.format;
    let effort =
        conversation.kwargs.get("reasoning_effort").and_then(Value::as_str).filter(|_| !app.template_knows_effort);
    let effort = effort.map(|effort| EFFORTS.iter().find(|(name, _)| *name == effort).map(|(_, most)| *most));
    let mut tools = conversation.tool_list();
    tools.retain(|tool| wanted.choice.allows(&tool.name));
    let dialects = std::mem::take(&mut conversation.dialects);
    let mut ignored = std::mem::take(&mut conversation.ignored);
    let room = body.size("max_tokens").or(body.size("max_completion_tokens")).or(body.size("max_output_tokens"));
    let fits = Fits::Answered(room.unwrap_or(usize::MAX));
    let prompt = conversation.render(app, fits).await?;
    if prompt.n_left_out > 0 {
        tracing::info!(
            model = app.model.id,
            messages = prompt.n_left_out,
            "left the oldest turns out: the context is full"
        );
        ignored.push(format!("messages (the {} oldest: context full)", prompt.n_left_out));
    }
    let opened = format.opens_thought(&prompt.text);
    let mut request = app.request(prompt.tokens);
    request.pictures = prompt.pictures;
    sampling::apply(body, &mut request, &app.tokenizer)?;
    let AnswerWish { choice, form, parallel, most_thought } = wanted;
    let budget = ["thinking_budget", "reasoning_budget"].into_iter().find_map(|name| Some((name, body.int(name)?)));
    if let Some((name, 0..)) = budget
        && format.thought().is_none()
    {
        ignored.push(name.into());
    }
    let most_thought = match (budget, most_thought, effort) {
        (Some((_, n)), ..) => usize::try_from(n).ok(),
        (None, Some(n), _) => Some(n),
        (None, None, Some(most)) => most,
        (None, None, None) => app.common.conversations.most_thought,
    };
    let most_calls = choice.most_calls(parallel);
    let is_free = form.is_some();
    let open_objects = form::open_objects(body);
    let held = Constrained { form, tools: tools.clone(), choice, open_objects, most_calls, opened, most_thought };
    let (constraint, loose) = form::constraint(app, format, held).await?;
    ignored.extend(loose);
    // Where a grammar holds calls, each becomes JSON unless a limit cuts it off, and its arguments can stream.
    let hold = if constraint.is_some() && !is_free { Hold::Head } else { Hold::Call };
    request.constraint = constraint;
    request.shown = format.shown(&app.tokenizer);
    Ok(Prepared { request, parsing: Parsing { format, tools, opened, hold }, dialects, ignored })
}
