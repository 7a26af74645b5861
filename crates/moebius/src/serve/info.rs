//! What the server says about itself: models, health, numbers, its own description.

use std::sync::Arc;

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::openapi;
use super::routes::{Answer, Input};
use super::worker::usage_share;

fn model_json(app: &App) -> Value {
    let model = &app.model;
    json!({
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "moebius",
        // Anthropic's clients read these two.
        "type": "model",
        "display_name": model.id,
        "max_model_len": app.worker.context(),
        "meta": {
            "description": model.description,
            "n_params": model.n_params,
            "size": model.size_bytes,
            "n_vocab": model.n_vocab,
            "n_ctx": app.worker.context(),
        },
    })
}

pub async fn models(app: Arc<App>, _: Input) -> Answer {
    let id = app.model.id.clone();
    let list = json!({"object": "list", "data": [model_json(&app)], "has_more": false, "first_id": id, "last_id": id});
    Ok(Json(list).into_response())
}

pub async fn model(app: Arc<App>, input: Input) -> Answer {
    let name = input.tail.unwrap_or_default();
    if name == app.model.id {
        return Ok(Json(model_json(&app)).into_response());
    }
    let name: String = name.chars().take(100).collect();
    Err(ApiError {
        code: Some("model_not_found"),
        ..ApiError::new(StatusCode::NOT_FOUND, format!("the model {name:?} is not here; {:?} is", app.model.id))
    })
}

/// 200 while the engine's thread lives.
pub async fn health(app: Arc<App>, _: Input) -> Answer {
    if !app.worker.alive() {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped"));
    }
    Ok(Json(json!({"status": "ok"})).into_response())
}

/// 200 while requests are taken; with what the engine is busy with.
pub async fn ready(app: Arc<App>, input: Input) -> Answer {
    if app.draining() {
        return Err(ApiError::stopping());
    }
    health(app.clone(), input).await?;
    let stats = app.worker.stats();
    let status = json!({
        "status": "ok",
        "model": app.model.id,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": usage_share(stats.pages),
    });
    Ok(Json(status).into_response())
}

pub async fn metrics(app: Arc<App>, _: Input) -> Answer {
    let text = app.metrics.text(app.worker.stats(), &app.model.id);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

pub async fn openapi(_: Arc<App>, _: Input) -> Answer {
    Ok(Json(openapi::document()).into_response())
}
