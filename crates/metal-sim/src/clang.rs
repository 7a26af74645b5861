//! Finds clang and compiles with it: the runner once, and each kernel source to a library that the runner loads.
//!
//! What was compiled is kept in a folder under the hash of all that goes into it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::rewrite::{self, Rewritten};

const RUNNER: &str = include_str!("../runtime/runner.cpp");
/// What plays `<metal_stdlib>`; each part builds on those before it.
const HEADER: &str = concat!(
    include_str!("../runtime/msl/types.h"),
    include_str!("../runtime/msl/math.h"),
    include_str!("../runtime/msl/simdgroup.h"),
    include_str!("../runtime/msl/matrix.h"),
    include_str!("../runtime/msl/atomic.h"),
    include_str!("../runtime/msl/limits.h"),
    include_str!("../runtime/msl/launch.h"),
);

/// Names to look for; the first that is new enough is taken.
const NAMES: [&str; 8] =
    ["clang++-19", "clang++-18", "clang++-17", "clang++-16", "clang++-20", "clang++-21", "clang++-22", "clang++"];

/// The oldest clang that compiles `runtime/msl`.
const LEAST_VERSION: u32 = 16;

/// Of every compilation of a kernel.
const KERNEL_FLAGS: &[&str] = &[
    "-x",
    "c++",
    "-std=c++17",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Wno-unknown-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-duplicate-decl-specifier",
    "-Wno-unused-value",
    "-Wno-pass-failed",
];

/// Those that instrument it. Without the processor's conversions to halves, `runtime/msl` has them, and checks them.
const CHECKED_FLAGS: &[&str] = &[
    "-O1",
    "-gline-tables-only",
    "-fPIC",
    "-mfma",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-mllvm",
    "-tsan-handle-cxx-exceptions=0",
];

/// Undefined behaviour that is looked for.
const UNDEFINED: &str = "bounds,shift,integer-divide-by-zero,vla-bound,signed-integer-overflow,float-cast-overflow";

/// A clang that is new enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clang {
    program: &'static str,
    version: String,
}

impl Clang {
    /// Looks for it, once in a process.
    ///
    /// # Errors
    /// A sentence when there is none, or when the machine is not one that the runner's fibers are written for.
    pub fn find() -> Result<Clang> {
        static FOUND: OnceLock<Result<Clang, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| Clang::look().map_err(|why| format!("{why:#}")));
        found.clone().map_err(anyhow::Error::msg)
    }

    fn look() -> Result<Clang> {
        ensure!(cfg!(all(target_arch = "x86_64", target_os = "linux")), "metal-sim runs on x86-64 Linux only");
        for program in NAMES {
            let Ok(out) = Command::new(program).arg("--version").stderr(Stdio::null()).output() else { continue };
            let version = String::from_utf8_lossy(&out.stdout).lines().next().unwrap_or_default().to_string();
            let major = version.split("version ").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
            if major.is_some_and(|major| major >= LEAST_VERSION) {
                return Ok(Clang { program, version });
            }
        }
        bail!(
            "metal-sim needs clang {LEAST_VERSION} or newer as one of {NAMES:?} (Debian, Ubuntu: apt install clang-19)"
        )
    }

    /// The runner, compiled to a program in `folder`.
    ///
    /// # Errors
    /// The folder cannot be written, or the compiler's message.
    pub fn runner(&self, folder: &Path) -> Result<PathBuf> {
        let program = folder.join(format!("runner-{:016x}", self.hash(&[RUNNER])));
        self.make(&program, |to| {
            let flags = ["-x", "c++", "-std=c++17", "-O2", "-fno-exceptions", "-fno-rtti", "-Wall", "-rdynamic"];
            let mut command = Command::new(self.program);
            command.args(flags).arg("-").arg("-o").arg(to).arg("-ldl");
            run(&mut command, RUNNER).map(drop)
        })
    }

    /// Kernel sources, of which no two are alike, each compiled to a library in `folder`, several at a time. Each must
    /// also pass a compilation in which the four address spaces are distinct types, as they are in Metal.
    ///
    /// # Errors
    /// Of each: the folder cannot be written, what the rewriter refuses, or the compiler's message.
    pub fn kernels(&self, sources: &[&str], folder: &Path) -> Vec<Result<PathBuf>> {
        let undefined = ["", "-recover"].map(|recover| format!("-fsanitize{recover}={UNDEFINED}"));
        let flags: Vec<&str> = CHECKED_FLAGS.iter().copied().chain(undefined.iter().map(String::as_str)).collect();
        let (common, own) = (KERNEL_FLAGS.join(" "), flags.join(" "));
        let library = |source| folder.join(format!("{:016x}.so", self.hash(&[source, HEADER, &common, &own])));
        let pairs: Vec<(&str, PathBuf)> = sources.iter().map(|&source| (source, library(source))).collect();
        let missing: Vec<&str> = pairs.iter().filter(|(_, path)| !path.exists()).map(|(source, _)| *source).collect();
        // A compiler takes longer to start than to check a kernel: it gets all of them, and each by itself only where
        // something is wrong, to find out which it is.
        let checked = match self.checked(&missing, folder) {
            Ok(all) => all.into_iter().map(Ok).collect(),
            Err(why) if missing.len() == 1 => vec![Err(why)],
            Err(_) => missing.iter().map(|source| Ok(self.checked(&[source], folder)?.remove(0))).collect(),
        };
        let checked: HashMap<&str, Result<Rewritten>> = missing.into_iter().zip(checked).collect();
        let next = AtomicUsize::new(0);
        let compile = || {
            let mut done = Vec::new();
            while let Some((source, path)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let made = match checked.get(source) {
                    None => Ok(path.clone()),
                    Some(Err(why)) => Err(anyhow!("{why:#}")),
                    Some(Ok(code)) => self.make(path, |to| self.library(code, &flags, folder, to)),
                };
                done.push((*source, made));
            }
            done
        };
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(checked.len().max(1));
        let mut made: HashMap<&str, Result<PathBuf>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(compile)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect()
        });
        let lost = || Err(anyhow!("its compilation was lost"));
        sources.iter().map(|source| made.remove(source).unwrap_or_else(lost)).collect()
    }

    /// Compiles what the rewriter made of a source to a library.
    fn library(&self, code: &Rewritten, flags: &[&str], folder: &Path, to: &Path) -> Result<()> {
        let object = to.with_extension("o");
        let mut command = self.with_header(flags, folder)?;
        run(command.args(["-c", "-", "-o"]).arg(&object), &format!("{}{}", code.body, code.table))?;
        // The sanitizers' own libraries stay away: the runner defines their functions. The linker alone starts in a
        // tenth of the time that clang takes to call it.
        let mut command = Command::new("ld");
        command.args(["-shared", "--hash-style=gnu", "--eh-frame-hdr", "-o"]).arg(to).arg(&object);
        let linked = run(command.arg("-l:libm.so.6"), "");
        std::fs::remove_file(&object)?;
        linked.map(drop)
    }

    /// A compilation of a kernel with these flags after the header, which each set of flags has precompiled.
    fn with_header(&self, flags: &[&str], folder: &Path) -> Result<Command> {
        let header = folder.join(format!("msl-{:016x}.h", self.hash(&[HEADER])));
        self.make(&header, |to| Ok(std::fs::write(to, HEADER)?))?;
        let hash = self.hash(&[HEADER, &KERNEL_FLAGS.join(" "), &flags.join(" ")]);
        let precompiled = self.make(&folder.join(format!("msl-{hash:016x}.pch")), |to| {
            let mut command = Command::new(self.program);
            // Without the time of the header, which other processes may write again.
            command.args(KERNEL_FLAGS).args(flags).args(["-x", "c++-header", "-Xclang", "-fno-pch-timestamp"]);
            run(command.arg(&header).arg("-o").arg(to), "").map(drop)
        })?;
        let mut command = Command::new(self.program);
        command.args(KERNEL_FLAGS).args(flags).arg("-include-pch").arg(precompiled);
        Ok(command)
    }

    /// A kernel source with its headers from these folders and its definitions expanded.
    ///
    /// # Errors
    /// The compiler's message.
    pub fn preprocess(&self, source: &str, includes: &[PathBuf]) -> Result<String> {
        // `runtime/msl` plays this header.
        let source = source.replace("#include <metal_stdlib>", "");
        let mut command = Command::new(self.program);
        command.args(["-x", "c++", "-std=c++17", "-E", "-D__METAL_VERSION__=310"]);
        for folder in includes {
            command.arg("-I").arg(folder);
        }
        run(command.arg("-"), &source)
    }

    /// The line of a source that an address of a library stands for; `None` where that cannot be found out.
    pub fn line(&self, library: &Path, pc: u64) -> Option<String> {
        let name = self.program.replace("clang++", "llvm-symbolizer");
        let mut command = Command::new(name);
        command.arg("--obj").arg(library).args(["--inlines", "--functions=none"]).arg(format!("{pc:#x}"));
        let out = run(&mut command, "").ok()?;
        let line = out.lines().find(|line| line.contains(':') && !line.contains("msl-") && !line.starts_with('?'))?;
        Some(line.rsplit('/').next().unwrap_or(line).to_string())
    }

    /// Sources that have passed the check of address spaces, rewritten.
    fn checked(&self, sources: &[&str], folder: &Path) -> Result<Vec<Rewritten>> {
        let all = self.expanded(sources)?;
        let all = all.iter().map(|source| Ok(rewrite::rewrite(source)?)).collect::<Result<Vec<Rewritten>>>()?;
        let mut code = String::new();
        for (i, rewritten) in all.iter().enumerate() {
            code.push_str(&format!("namespace msl_{i} {{\n{}", rewritten.body));
            for (j, kernel) in rewritten.kernels.iter().enumerate() {
                code.push_str(&format!("\nauto* msl_kernel_{j} = &{kernel};"));
            }
            code.push_str("\n}\n");
        }
        if !all.is_empty() {
            let mut command = self.with_header(&["-DMSL_TYPECHECK"], folder)?;
            run(command.args(["-fsyntax-only", "-"]), &code).context("address spaces")?;
        }
        Ok(all)
    }

    /// Sources with their definitions expanded. Each begins at line 1 and without the definitions of those before it.
    fn expanded(&self, sources: &[&str]) -> Result<Vec<String>> {
        const BEGIN: &str = "msl_source_begins\n";
        let mut text = String::new();
        for source in sources {
            text.push_str(&format!("{BEGIN}#line 1 \"<stdin>\"\n{source}\n"));
            for name in source.lines().filter_map(defined) {
                text.push_str(&format!("#undef {name}\n"));
            }
        }
        let text = if sources.is_empty() { text } else { self.preprocess(&text, &[])? };
        let all: Vec<String> = text.split(BEGIN).skip(1).map(String::from).collect();
        ensure!(all.len() == sources.len(), "{} sources came out of {}", all.len(), sources.len());
        Ok(all)
    }

    fn hash(&self, parts: &[&str]) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.version, parts).hash(&mut hasher);
        hasher.finish()
    }

    /// Makes a file, unless it is there. Several processes may make the same one: each moves a whole file into place.
    fn make(&self, path: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        if !path.exists() {
            let folder = path.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
            let id = format!("{}-{:?}", std::process::id(), std::thread::current().id());
            let own = path.with_extension(format!("{}.tmp", id.replace(['(', ')'], "")));
            make(&own)?;
            std::fs::rename(&own, path).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(path.to_path_buf())
    }
}

/// The name that a line of a source defines.
fn defined(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("define")?.trim_start();
    Some(&rest[..rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())])
}

/// Runs a compiler on a text and returns what it prints.
fn run(command: &mut Command, input: &str) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    let mut stdin = child.stdin.take().context("no pipe to the compiler")?;
    let input = input.to_string();
    // A compiler that stops early closes the pipe; what it says is the better message.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let out = child.wait_with_output()?;
    let _ = writer.join();
    ensure!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}
