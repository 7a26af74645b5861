//! What a client is told when a request is refused or fails, and the three shapes in which the APIs say it.
//! Knows no routes and no engine thread.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};

/// Whose manner of speaking a route follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    Anthropic,
    /// `{"error": "message"}`.
    Ollama,
}

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    /// What is wrong, without a word of what the client sent: it goes to the log too.
    pub message: String,
    /// What the client alone is told behind it, such as the value that it sent.
    pub quote: String,
    /// The field that is wrong, where one is.
    pub param: Option<String>,
    /// A word for programs, where OpenAI has one.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense.
    pub retry_after: Option<u64>,
}

/// Why an answer is no success, for the log.
#[derive(Clone, Debug)]
pub struct Why(pub String);

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let (message, quote) = (message.into(), String::new());
        ApiError { status, message, quote, param: None, code: None, retry_after: None }
    }

    /// 400 about the request as a whole.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 about one field.
    pub fn field(param: impl Into<String>, message: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = format!("`{param}` {message}");
        ApiError { param: Some(param), ..ApiError::bad(message) }
    }

    /// Adds what only the client is told.
    pub fn quoting(self, quote: impl std::fmt::Display) -> ApiError {
        ApiError { quote: quote.to_string(), ..self }
    }

    /// 500: a failure of the server.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: the server is going away.
    pub fn stopping() -> ApiError {
        ApiError {
            retry_after: Some(5),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
        }
    }

    /// 429: come back later.
    pub fn busy(message: impl Into<String>, retry_after: u64) -> ApiError {
        ApiError {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(retry_after),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// Returns the body of the answer.
    pub fn json(&self, style: Style, request_id: &str) -> Value {
        let message = format!("{}{}", self.message, self.quote);
        match style {
            Style::OpenAi => json!({"error": {
                "message": message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Style::Anthropic => json!({
                "type": "error",
                "error": {"type": self.anthropic_type(), "message": message},
                "request_id": request_id,
            }),
            Style::Ollama => json!({"error": self.message}),
        }
    }

    /// Returns the whole answer.
    pub fn response(&self, style: Style, request_id: &str) -> Response {
        let mut response = Response::new(Body::from(self.json(style, request_id).to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Why(self.message.clone()));
        response
    }

    fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }
}
