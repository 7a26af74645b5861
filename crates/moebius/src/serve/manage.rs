//! Loading and unloading of models on demand, at llama-server's routes.

use std::sync::Arc;

use axum::Json;
use axum::response::IntoResponse;
use serde_json::json;

use super::fields::{Field, Kind, Read, field};
use super::fleet::Fleet;
use super::routes::{Answer, Input};

/// Fields of both routes.
pub const FIELDS: &[Field] = &[field("model", Kind::Text, "name from /v1/models; any name if only one is served")];

/// Answers when the model is loaded.
pub async fn load(fleet: Arc<Fleet>, input: Input) -> Answer {
    fleet.get(input.body.fields.text("model")).await?;
    Ok(Json(json!({"success": true})).into_response())
}

/// Answers at once; the model is unloaded when the requests that use it have ended.
pub async fn unload(fleet: Arc<Fleet>, input: Input) -> Answer {
    fleet.unload(input.body.fields.text("model"))?;
    Ok(Json(json!({"success": true})).into_response())
}
