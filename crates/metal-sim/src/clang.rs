//! Finds clang and compiles with it: the runner once, and each kernel source to a library that the runner loads.
//!
//! What was compiled is kept in a folder under the hash of all that goes into it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::rewrite;

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
    /// Looks for it.
    ///
    /// # Errors
    /// A sentence when there is none, or when the machine is not one that the runner's fibers are written for.
    pub fn find() -> Result<Clang> {
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

    /// A kernel source, compiled to a library in `folder`. It must also pass a compilation in which the four address
    /// spaces are distinct types, as they are in Metal.
    ///
    /// # Errors
    /// The folder cannot be written, what the rewriter refuses, or the compiler's message.
    pub fn kernels(&self, source: &str, folder: &Path) -> Result<PathBuf> {
        let flags = [KERNEL_FLAGS, CHECKED_FLAGS].map(|flags| flags.join(" "));
        let hash = self.hash(&[source, HEADER, &flags[0], &flags[1], UNDEFINED]);
        let library = folder.join(format!("{hash:016x}.so"));
        self.make(&library, |to| {
            let header = folder.join(format!("msl-{:016x}.h", self.hash(&[HEADER])));
            self.make(&header, |to| Ok(std::fs::write(to, HEADER)?))?;
            let rewritten = rewrite::rewrite(&self.preprocess(source, &[])?)?;
            let code = rewritten.body.clone() + &rewritten.table;
            self.typecheck(&rewritten, &header)?;
            let object = to.with_extension("o");
            let mut command = Command::new(self.program);
            command.args(KERNEL_FLAGS).args(CHECKED_FLAGS).arg("-include").arg(&header);
            command.arg(format!("-fsanitize={UNDEFINED}")).arg(format!("-fsanitize-recover={UNDEFINED}"));
            run(command.args(["-c", "-", "-o"]).arg(&object), &code)?;
            // The sanitizers' own libraries stay away: the runner defines their functions.
            let mut command = Command::new(self.program);
            let linked = run(command.args(["-shared", "-o"]).arg(to).arg(&object).arg("-lm"), "");
            std::fs::remove_file(&object)?;
            linked.map(drop)
        })
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

    fn typecheck(&self, rewritten: &rewrite::Rewritten, header: &Path) -> Result<()> {
        let mut code = rewritten.body.clone();
        for (i, kernel) in rewritten.kernels.iter().enumerate() {
            code.push_str(&format!("\nauto* msl_kernel_{i} = &{kernel};"));
        }
        let mut command = Command::new(self.program);
        command.args(KERNEL_FLAGS).args(["-DMSL_TYPECHECK", "-fsyntax-only", "-include"]).arg(header).arg("-");
        run(&mut command, &code).map(drop).context("address spaces")
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
