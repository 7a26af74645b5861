//! From a conversation to a request for the engine: what the three conversation APIs share.

use std::sync::Arc;

use engine::formats::Hold;
use engine::scheduler::Request;

use super::app::App;
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::Object;
use super::form::{self, Form, Held};
use super::generate::Parsing;
use super::sampling;
use super::tools::ToolChoice;

/// What a client wants of the answer's form.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    pub choice: ToolChoice,
    pub form: Option<Form>,
    /// At most one call.
    pub single: bool,
}

/// The request of a conversation, with the sampling of the body, and how to read its answer.
pub async fn prepare(
    app: &Arc<App>,
    mut conversation: Conversation,
    wanted: Wanted,
    body: &Object,
    stream: bool,
) -> Result<(Request, Parsing), ApiError> {
    wanted.choice.check(&conversation.tools)?;
    if wanted.choice == ToolChoice::None {
        conversation.tools.clear();
    }
    let format = app.format;
    let tools = conversation.tool_list();
    let prompt = conversation.render(app, true).await?;
    let opened = format.opens_thought(&prompt.text);
    let mut request = app.request(prompt.tokens);
    sampling::apply(body, &mut request, &app.tokenizer)?;
    let Wanted { choice, form, single } = wanted;
    let open_objects = form::open_objects(body);
    let held = Held { form, tools: tools.clone(), choice, open_objects, single, opened };
    request.constraint = form::constraint(app, format, held).await?;
    request.shown = format.shown(&app.tokenizer);
    // A whole answer shows a call that went wrong as text; a stream has shown its beginning by then.
    let hold = if stream { Hold::Head } else { Hold::Call };
    Ok((request, Parsing { format, tools, opened, hold }))
}
