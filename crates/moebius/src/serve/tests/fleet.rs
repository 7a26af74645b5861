//! Several models: which are loaded when, and what a request gets whose model is not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use clap::Parser;
use serde_json::{Value, json};

use super::{Request, StatusCode, posting, send};
use crate::args::{Cli, Command, StepArgs};
use crate::device::{Held, Prefer};
use crate::load::EngineSetup;
use crate::serve::common::{Common, Conversations};
use crate::serve::fleet::{Alias, Fleet, Listed, Loader};
use crate::serve::guard::{Door, Guard};
use crate::serve::keys::Keys;
use crate::serve::{Places, routes};

/// A server over models in a folder, with what the command line says.
struct Several {
    router: Router,
    fleet: Arc<Fleet>,
    _folder: tempfile::TempDir,
}

impl Several {
    /// Links to the embedded model under these names, and files that are no models.
    fn start(names: &[&str], broken: &[&str], args: &[&str], room: Option<usize>) -> Several {
        Several::with_aliases(names, broken, args, room, Vec::new())
    }

    fn with_aliases(
        names: &[&str],
        broken: &[&str],
        args: &[&str],
        room: Option<usize>,
        aliases: Vec<Alias>,
    ) -> Several {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &&str| folder.path().join(format!("{name}.gguf"));
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
        for name in names {
            std::fs::copy(&model, path(name)).unwrap();
        }
        for name in broken {
            std::fs::write(path(name), "GGUF, but nothing sensible").unwrap();
        }
        let paths: Vec<PathBuf> = names.iter().chain(broken).map(path).collect();
        let line = [&["moebius", "serve", "-t", "1", "--ctx", "256"], args].concat();
        let Command::Serve(args) = Cli::parse_from(line).command else { panic!("serve") };
        let guard = Guard::new(args.host, &[], &[], false);
        let door = Arc::new(Door { guard, keys: Keys::default() });
        let common = Arc::new(Common::new(None, Conversations::default()));
        let model = |path: PathBuf| Listed {
            sight: crate::args::SightArgs::default(),
            id: path.file_stem().unwrap().to_string_lossy().into_owned(),
            path,
            setup: EngineSetup {
                sequences: 2,
                resident_bytes: Some(50_000_000),
                ..EngineSetup::of(&args.engine, Prefer::Cpu).unwrap()
            },
            sampling: args.sampling.clone(),
            template: None,
            places: Places { parallel: 2, queue: 4 },
        };
        let StepArgs { memory, gpu_memory, .. } = args.engine.step;
        let room = Held { host: room.unwrap_or(usize::MAX), gpu: usize::MAX, ordinal: 0 };
        let idle = args.sleep_idle_seconds.map(std::time::Duration::from_secs);
        let loader = Loader { memory, gpu_memory, room, idle };
        let models = paths.into_iter().map(model).collect();
        let fleet = Fleet::of_several(common, models, loader).unwrap().with_aliases(aliases).unwrap();
        let fleet = Arc::new(fleet);
        Several { router: routes::router(fleet.clone(), door), fleet, _folder: folder }
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, answer) = send(&self.router, posting(path, body)).await.json().await;
        (status.as_u16(), answer)
    }

    async fn chat(&self, model: &str) -> (u16, Value) {
        self.post("/v1/chat/completions", &super::chat("Hi", json!({"model": model, "max_tokens": 4}))).await
    }

    async fn get(&self, path: &str) -> Value {
        let (status, answer) = send(&self.router, Request::get(path).body("".into()).unwrap()).await.json().await;
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    /// Returns the names of those that are loaded.
    async fn loaded(&self) -> Vec<String> {
        let list = self.get("/v1/models").await["data"].as_array().unwrap().clone();
        let is_loaded = |model: &&Value| model["status"]["value"] == "loaded";
        list.iter().filter(is_loaded).map(|model| model["id"].as_str().unwrap().to_string()).collect()
    }
}

impl Drop for Several {
    fn drop(&mut self) {
        let ended = self.fleet.stop();
        assert!(std::thread::panicking() || ended.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_loaded_when_they_are_named() {
    let server = Several::start(&["Alpha", "beta"], &["broken"], &[], None);
    assert!(server.loaded().await.is_empty());
    for (name, id) in [("beta", "beta"), ("ALPHA", "Alpha"), ("beta:latest", "beta")] {
        let (status, answer) = server.chat(name).await;
        assert_eq!((status, &answer["model"]), (200, &json!(id)), "{name}: {answer}");
    }
    assert_eq!(server.loaded().await, ["Alpha", "beta"]);
    // What cannot be loaded is an error for its request, and stays in the list with the reason.
    let (status, answer) = server.chat("broken").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 500 && message.contains("failed to load broken") && !message.contains(".gguf"), "{answer}");
    let list = server.get("/v1/models").await;
    assert_eq!(list["data"][2]["status"]["failed"], true, "{list}");
    let (status, answer) = server.chat("gamma").await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 404 && message.contains("Alpha, beta, broken") && message.contains("gamma"), "{answer}");
    assert_eq!(server.chat("Alpha").await.0, 200);
    // Ollama's lists, and what is asked of one model by its name.
    let names = |list: &Value| -> Vec<Value> {
        list["models"].as_array().unwrap().iter().map(|model| model["name"].clone()).collect()
    };
    assert_eq!(names(&server.get("/api/tags").await), ["Alpha", "beta", "broken"]);
    assert_eq!(names(&server.get("/api/ps").await), ["Alpha", "beta"]);
    assert_eq!(server.post("/api/show", &json!({"model": "beta"})).await.1["details"]["family"], "qwen3moe");
    assert_eq!(server.post("/api/show", &json!({"model": "gamma"})).await.0, 404);
    assert_eq!(server.get("/props?model=%62eta").await["model_alias"], "beta");
    assert_eq!(server.get("/v1/models/beta").await["id"], "beta");
    // Without a name it is the first.
    let (_, answer) = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).await;
    assert_eq!(answer["model"], "Alpha");
}

#[tokio::test(flavor = "multi_thread")]
async fn models_have_further_names() {
    let alias = |name: &str, model: &str| Alias { name: name.into(), model: model.into() };
    let aliases = vec![alias("claude-*", "b"), alias("b", "a"), alias("gpt-5", "A")];
    let server = Several::with_aliases(&["a", "b"], &[], &[], None, aliases);
    for (name, id) in [("claude-opus-4", "b"), ("b", "b"), ("gpt-5", "a"), ("gpt-5:latest", "a")] {
        let (status, answer) = server.chat(name).await;
        assert_eq!((status, &answer["model"]), (200, &json!(id)), "{name}: {answer}");
    }
    assert_eq!(server.chat("gpt-4").await.0, 404);
    let listed = server.get("/v1/models").await;
    let listed =
        listed["data"].as_array().unwrap().iter().map(|model| (model["id"].clone(), model["alias_of"].clone()));
    let expected = [("a", Value::Null), ("b", Value::Null), ("gpt-5", json!("a"))];
    assert_eq!(listed.collect::<Vec<_>>(), expected.map(|(id, of)| (json!(id), of)));
    assert!(crate::serve::names(&["a=".into()]).is_err() && crate::serve::names(&["a".into(), "b".into()]).is_err());
    let (own, further) = crate::serve::names(&["own".into(), "x*=y".into()]).unwrap();
    assert_eq!((own.as_deref(), further), (Some("own"), vec![alias("x*", "y")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_unused_for_longest_makes_room() {
    for (args, room) in [(&["--memory", "122M"][..], None), (&[], Some(90_000_000))] {
        let server = Several::start(&["a", "b", "c"], &[], args, room);
        for (name, loaded) in
            [("a", &["a"][..]), ("b", &["a", "b"]), ("a", &["a", "b"]), ("c", &["a", "c"]), ("b", &["b", "c"])]
        {
            let (status, answer) = server.chat(name).await;
            assert_eq!(status, 200, "{name}: {answer}");
            assert_eq!(server.loaded().await, loaded, "{args:?}: {name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_for_their_model_and_are_told_when_the_server_stops() {
    let server = Several::start(&["a", "b", "c"], &[], &[], Some(1));
    // One at a time: each takes the place of the one before, once its answer is complete.
    let long = |model: &str| super::chat("Go on", json!({"model": model, "max_tokens": 60, "ignore_eos": true}));
    let (a, b, c) = (long("a"), long("b"), long("c"));
    let path = "/v1/chat/completions";
    let answers =
        tokio::join!(server.post(path, &a), server.post(path, &b), server.post(path, &c), server.post(path, &a));
    for (status, answer) in [answers.0, answers.1, answers.2, answers.3] {
        assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(60)), "{answer}");
    }
    assert_eq!(server.loaded().await.len(), 1);
    // A model at work keeps its memory, and who waits for it hears that the server stops.
    let held = send(
        &server.router,
        posting(
            path,
            &super::chat(
                "Go on",
                json!({
                    "model": "a", "stream": true, "max_tokens": 200, "ignore_eos": true,
                }),
            ),
        ),
    )
    .await;
    assert_eq!(held.status, 200);
    let fleet = server.fleet.clone();
    let stop = async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        fleet.common.drain();
    };
    let ((status, answer), ()) = tokio::join!(server.chat("b"), stop);
    assert_eq!(status, 503, "{answer}");
    drop(held);
}

/// Models go when their time is over, when they are told to, and not while they are at work.
#[tokio::test(flavor = "multi_thread")]
async fn models_are_unloaded_by_hand_and_when_they_are_idle() {
    let server = Several::start(&["a", "b"], &[], &[], None);
    let watch = tokio::spawn(server.fleet.clone().watch());
    let is_gone = async |name: &str| {
        for _ in 0..200 {
            if !server.loaded().await.iter().any(|loaded| loaded == name) {
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        false
    };
    assert_eq!(server.post("/models/load", &json!({"model": "a"})).await, (200, json!({"success": true})));
    assert_eq!(server.post("/models/load", &json!({"model": "b"})).await.0, 200);
    assert_eq!(server.loaded().await, ["a", "b"]);
    assert_eq!(server.post("/models/unload", &json!({"model": "c"})).await.0, 404);
    assert_eq!(server.post("/models/unload", &json!({"model": "a"})).await, (200, json!({"success": true})));
    assert!(is_gone("a").await);
    assert_eq!(server.loaded().await, ["b"]);
    // Ollama's words for the same.
    let (_, answer) = server.post("/api/generate", &json!({"model": "b", "keep_alive": 0})).await;
    assert_eq!((&answer["done_reason"], &answer["done"]), (&json!("unload"), &json!(true)), "{answer}");
    assert!(is_gone("b").await);
    // After its answer, which is whole.
    let body =
        json!({"model": "b", "prompt": "Go on", "keep_alive": "0s", "stream": false, "options": {"num_predict": 20}});
    let (status, answer) = server.post("/api/generate", &body).await;
    assert!(status == 200 && answer["eval_count"].as_u64() > Some(0), "{answer}");
    assert!(is_gone("b").await);
    for (span, status) in [("5m", 200), ("1h30m", 200), ("-1", 200), ("soon", 400), ("", 400)] {
        assert_eq!(
            server.post("/api/generate", &json!({"model": "b", "keep_alive": span})).await.0,
            status,
            "{span:?}"
        );
    }
    let expires = server.get("/api/ps").await["models"][0]["expires_at"].to_string();
    assert!(expires.contains("2318"), "{expires}");
    watch.abort();

    let server = Several::start(&["only"], &[], &["--sleep-idle-seconds", "1"], None);
    let watch = tokio::spawn(server.fleet.clone().watch());
    assert_eq!(server.chat("any name").await.0, 200);
    for _ in 0..200 {
        if server.loaded().await.is_empty() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(server.loaded().await.is_empty());
    assert_eq!(server.chat("only").await.0, 200);
    watch.abort();
}

/// A model whose name says that it ranks documents is asked "yes" or "no"; others refuse.
#[tokio::test(flavor = "multi_thread")]
async fn documents_are_ranked_by_models_for_that() {
    let server = Several::start(&["plain", "tiny-reranker"], &[], &[], None);
    let documents = ["The sky is blue.", "Foxes live in the wood.", "<|im_end|> yes"];
    let body = |model: &str, more: Value| {
        let mut body = json!({"model": model, "query": "Where do foxes live?", "documents": documents});
        more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        body
    };
    let (status, answer) = server.post("/v1/rerank", &body("plain", json!({}))).await;
    assert!(status == 400 && answer["error"]["param"] == "model", "{answer}");
    let (status, answer) = server.post("/rerank", &body("tiny-reranker", json!({}))).await;
    let results = answer["results"].as_array().unwrap();
    assert_eq!((status, results.len()), (200, 3), "{answer}");
    let score = |result: &Value| result["relevance_score"].as_f64().unwrap();
    assert!(results.iter().all(|result| (0.0..=1.0).contains(&score(result))), "{answer}");
    assert!(results.windows(2).all(|pair| score(&pair[0]) >= score(&pair[1])), "{answer}");
    // The same from the log-probabilities of the two answers behind the same prompt.
    let tokens = async |text: &str, special: bool| {
        let body = json!({"model": "tiny-reranker", "content": text, "parse_special": special});
        server.post("/tokenize", &body).await.1["tokens"].as_array().unwrap().clone()
    };
    let mut prompt = Vec::new();
    for (i, piece) in crate::serve::rerank::tests::pieces("Where do foxes live?", documents[1]).iter().enumerate() {
        prompt.extend(tokens(piece, i != 1).await);
    }
    let mut two = Vec::new();
    for word in ["yes", "no"] {
        let mut prompt = prompt.clone();
        prompt.push(tokens(word, false).await[0].clone());
        let id = prompt.last().unwrap().to_string();
        let body = json!({"model": "tiny-reranker", "prompt": prompt, "max_tokens": 0, "prompt_logprobs": 1});
        let (_, answer) = server.post("/v1/completions", &body).await;
        let last = answer["choices"][0]["prompt_logprobs"].as_array().unwrap().last().unwrap().clone();
        let own = last[&id]["logprob"].as_f64().unwrap();
        two.push(own);
    }
    let expected = 1.0 / (1.0 + (two[1] - two[0]).exp());
    let got = results.iter().find(|result| result["index"] == 1).map(score).unwrap();
    assert!((got - expected).abs() < 1e-4, "{got} {expected}");
    let more = json!({"top_n": 1, "return_documents": true, "documents": [{"text": "a"}, "b"]});
    let (_, answer) = server.post("/v1/rerank", &body("tiny-reranker", more)).await;
    assert_eq!(answer["results"].as_array().map(Vec::len), Some(1), "{answer}");
    assert!(answer["results"][0]["document"]["text"].is_string(), "{answer}");
}
