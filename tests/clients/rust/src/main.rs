//! async-openai against a running server: `client http://127.0.0.1:8080`.

use std::error::Error;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{
    ChatCompletionRequestMessage, ChatCompletionRequestUserMessage, CreateChatCompletionRequest,
    CreateChatCompletionRequestArgs,
};
use futures_util::StreamExt;

fn request(text: &str) -> Result<CreateChatCompletionRequest, OpenAIError> {
    let message = ChatCompletionRequestMessage::User(ChatCompletionRequestUserMessage::from(text));
    CreateChatCompletionRequestArgs::default()
        .model("any")
        .messages([message])
        .max_completion_tokens(32_u32)
        .temperature(0.0)
        .build()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("address of the server")?;
    let config = OpenAIConfig::new().with_api_base(format!("{address}/v1")).with_api_key("none");
    let client = Client::with_config(config);

    let whole = client.chat().create(request("Tell me a story about a fox")?).await?;
    let whole = whole.choices[0].message.content.clone().ok_or("no content")?;
    let mut stream = client.chat().create_stream(request("Tell me a story about a fox")?).await?;
    let mut text = String::new();
    while let Some(chunk) = stream.next().await {
        for choice in chunk?.choices {
            text.push_str(choice.delta.content.as_deref().unwrap_or_default());
        }
    }
    assert_eq!(text, whole);
    assert!(!text.is_empty());
    println!("ok      async-openai: chat and stream agree");

    let mut empty = request("")?;
    empty.messages.clear();
    match client.chat().create(empty).await {
        Err(OpenAIError::ApiError(error)) => println!("ok      async-openai: errors are the package's own: {error}"),
        other => panic!("{other:?}"),
    }
    Ok(())
}
