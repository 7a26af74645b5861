//! Files of recorded routes: which experts the tokens of a run chose, in order.
//!
//! JSON lines: an object with the routers, then for every token an array with the ids of every router's experts, best
//! first.

use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use backend::RouterInfo;
use serde_json::{Value, json};

use crate::input;

/// The experts of tokens.
#[derive(Debug)]
pub struct Trace {
    /// Layer, number of experts and number a token, of every router.
    pub routers: Vec<RouterInfo>,
    /// `[tokens][Σ n_used]`.
    pub tokens: Vec<Vec<u16>>,
}

impl Trace {
    /// No tokens yet.
    pub fn new(routers: &[RouterInfo]) -> Trace {
        Trace { routers: routers.to_vec(), tokens: Vec::new() }
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(std::fs::File::create(path)?);
            let router = |r: &RouterInfo| json!({"layer": r.layer, "n_expert": r.n_expert, "n_used": r.n_used});
            let routers: Vec<Value> = self.routers.iter().map(router).collect();
            writeln!(out, "{}", json!({ "routers": routers }))?;
            self.tokens.iter().try_for_each(|ids| writeln!(out, "{}", json!(ids)))?;
            out.flush()
        };
        write().with_context(|| format!("write {}", path.display()))
    }

    /// Reads a file that is for these routers.
    ///
    /// # Errors
    /// The file cannot be read, is none of this kind, or is of another model.
    pub fn read(path: &Path, routers: &[RouterInfo]) -> Result<Trace> {
        let text = input::text(path)?;
        let mut lines = text.lines();
        let failed = || format!("read routes from {}", path.display());
        let head: Value = serde_json::from_str(lines.next().unwrap_or_default()).with_context(failed)?;
        let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or(u64::MAX);
        let same = head["routers"].as_array().is_some_and(|found| {
            found.len() == routers.len()
                && found.iter().zip(routers).all(|(value, router)| {
                    number(value, "n_expert") == router.n_expert as u64
                        && number(value, "n_used") == router.n_used as u64
                })
        });
        ensure!(same, "{}: it has other routers than the model", failed());
        let width: usize = routers.iter().map(|router| router.n_used).sum();
        let mut trace = Trace::new(routers);
        for (i, line) in lines.enumerate() {
            let ids: Vec<u16> = serde_json::from_str(line).with_context(|| format!("{}: line {}", failed(), i + 2))?;
            let n = ids.len();
            ensure!(n == width, "{}: line {} has {n} experts, {width} are wanted", failed(), i + 2);
            trace.tokens.push(ids);
        }
        ensure!(!trace.tokens.is_empty(), "{}: no tokens", failed());
        Ok(trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("routes");
        let routers =
            [RouterInfo { layer: 0, n_expert: 8, n_used: 2 }, RouterInfo { layer: 1, n_expert: 4, n_used: 1 }];
        let trace = Trace { tokens: vec![vec![7, 0, 3], vec![1, 2, 0]], ..Trace::new(&routers) };
        trace.write(&path).unwrap();
        assert_eq!(Trace::read(&path, &routers).unwrap().tokens, trace.tokens);
        let error = |path: &Path, routers: &[RouterInfo]| format!("{:#}", Trace::read(path, routers).unwrap_err());
        assert!(error(&path, &routers[..1]).ends_with("it has other routers than the model"));
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, why) in [("[1,2]", "line 4 has 2 experts, 3 are wanted"), ("[1,-2,0]", "line 4: invalid value")] {
            std::fs::write(&path, format!("{text}{line}\n")).unwrap();
            assert!(error(&path, &routers).contains(why), "{}", error(&path, &routers));
        }
    }
}
