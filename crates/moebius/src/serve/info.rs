//! What the server says about itself: models, health, numbers, its own description.

use std::sync::Arc;

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use engine::sampler::{Mirostat, SamplerParams};
use serde_json::{Value, json};

use crate::embedded;

use super::app::App;
use super::error::ApiError;
use super::openapi;
use super::routes::{Answer, Input};
use super::worker::usage_share;

fn model_json(app: &App) -> Value {
    let model = &app.model;
    let description = match model.embedded {
        true => format!("{}: {}", model.description, embedded::ABOUT),
        false => model.description.clone(),
    };
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
            "description": description,
            "embedded": model.embedded,
            "has_template": app.template.is_some(),
            "sampling": sampling_json(&app.sampling),
            "n_params": model.n_params,
            "size": model.size_bytes,
            "n_vocab": model.n_vocab,
            "n_ctx": app.worker.context(),
        },
    })
}

/// What a request that names no sampler gets, under the names of its fields.
fn sampling_json(sampling: &SamplerParams) -> Value {
    // A shortest decimal of 32 bits, as the number was written.
    let number = |value: f32| value.to_string().parse::<f64>().map_or(Value::Null, Value::from);
    json!({
        "temperature": number(sampling.temperature),
        "top_p": number(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": number(sampling.min_p),
        "typical_p": number(sampling.typical_p),
        "top_n_sigma": number(sampling.top_n_sigma),
        "repeat_penalty": number(sampling.penalty_repeat),
        "repeat_last_n": sampling.penalty_last_n,
        "frequency_penalty": number(sampling.penalty_frequency),
        "presence_penalty": number(sampling.penalty_presence),
        "dry_multiplier": number(sampling.dry_multiplier),
        "dry_base": number(sampling.dry_base),
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_last_n,
        "xtc_probability": number(sampling.xtc_probability),
        "xtc_threshold": number(sampling.xtc_threshold),
        "dynatemp_range": number(sampling.dynatemp_range),
        "dynatemp_exponent": number(sampling.dynatemp_exponent),
        "mirostat": match sampling.mirostat {
            Mirostat::Off => 0,
            Mirostat::V1 => 1,
            Mirostat::V2 => 2,
        },
        "mirostat_tau": number(sampling.mirostat_tau),
        "mirostat_eta": number(sampling.mirostat_eta),
        "min_keep": sampling.min_keep,
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
