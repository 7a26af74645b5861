//! CUDA as its users meet it, on machines without a GPU: a driver and a run-time compiler made for these tests
//! (`data/fake_cuda.c`), whose kernels compute nothing and whose variables plant faults.
#![cfg(target_os = "linux")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

/// What a run of the program says.
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

/// A folder with `libcuda.so`, and one with `libnvrtc.so` too.
fn libraries() -> &'static [PathBuf; 2] {
    static FOLDERS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{}", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_cuda.c");
        let folders = ["driver", "both"].map(|name| root.join(name));
        for folder in &folders {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        for (folder, part, name) in [
            (&folders[0], "-DDRIVER", "libcuda.so"),
            (&folders[1], "-DDRIVER", "libcuda.so"),
            (&folders[1], "-DNVRTC", "libnvrtc.so"),
        ] {
            let mut cc = Command::new("cc");
            cc.args(["-shared", "-fPIC", "-O1", part, "-o"]).arg(folder.join(name)).arg(&source).arg("-lpthread");
            assert!(cc.status().expect("a C compiler").success(), "{name} does not compile");
        }
        folders
    })
}

/// A command of the program beside these libraries and settings, with a cache folder of its own.
fn command(libraries: &Path, settings: &[(&str, &str)], args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.args(args).env("MOEBIUS_CONFIG", "").env("LD_LIBRARY_PATH", libraries);
    command.env("XDG_CACHE_HOME", libraries.join("cache")).env_remove("MOEBIUS_DEVICE");
    command.envs(settings.iter().copied());
    command
}

fn run(libraries: &Path, settings: &[(&str, &str)], args: &[&str]) -> Said {
    let output = command(libraries, settings, args).stdin(Stdio::null()).output().expect("start moebius");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// A few tokens of the embedded model; on the fake device one token again and again.
const SHORT: &[&str] = &["run", "--raw", "Once", "-n", "3", "--temperature", "0", "--ignore-eos", "-c", "64"];

fn short<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [SHORT, more].concat()
}

#[test]
fn a_gpu_is_taken_where_there_is_one_and_named() {
    let [driver, both] = libraries();
    let on_gpu = run(both, &[], SHORT);
    assert_eq!(on_gpu.code, Some(0), "{}", on_gpu.err);
    assert!(on_gpu.err.contains("computing on Fake A (--backend cpu selects the CPU)"), "{}", on_gpu.err);
    let on_cpu = run(both, &[], &short(&["--backend", "cpu"]));
    assert!(!on_cpu.err.contains("computing on"), "{}", on_cpu.err);
    assert_ne!(on_gpu.out, on_cpu.out, "the fake device computes nothing");
    // The CPU takes its place, says why, and answers as it does alone.
    for (libraries, settings, args, why) in [
        (driver, &[][..], &[][..], "computing on the CPU: Fake A: NVIDIA's run-time compiler (NVRTC) is not installed"),
        (both, &[("FAKE_VERSION", "11040")], &[], "the NVIDIA driver speaks CUDA 11.4, 12.0 is needed: update it"),
        (both, &[("FAKE_ARCH", "75")], &[], "the device has compute capability 7.5, 8.0 is needed"),
        (both, &[("FAKE_NVRTC", "11")], &[], "NVRTC is version 11.0, 12.0 is needed"),
        (both, &[("FAKE_FREE", "4000000")], &[], "fit the model on Fake A: "),
        (both, &[("FAKE_ALLOC_FAILS", "2")], &[], "hold the key-value cache: "),
        (both, &[], &["--isa", "scalar"], "--isa only concerns the CPU (--backend cuda selects the GPU)"),
    ] {
        let said = run(libraries, settings, &short(args));
        assert_eq!(said.code, Some(0), "{settings:?}: {}", said.err);
        assert!(said.err.contains(why) && said.err.contains("computing on the CPU: "), "{settings:?}: {}", said.err);
        assert_eq!(said.out, on_cpu.out, "{settings:?}");
        // Named, the GPU is not replaced.
        if args.is_empty() {
            let said = run(libraries, settings, &short(&["--backend", "cuda"]));
            assert_eq!((said.code, said.out.as_str()), (Some(1), ""), "{settings:?}");
            assert!(!said.err.contains("computing on the CPU"), "{settings:?}: {}", said.err);
        }
    }
    // No device, and no driver: not a word.
    for (libraries, settings) in [(both.as_path(), &[("FAKE_DEVICES", "0")][..]), (Path::new("/nowhere"), &[])] {
        let said = run(libraries, settings, SHORT);
        assert!(said.code == Some(0) && !said.err.contains("computing on"), "{}", said.err);
        assert_eq!(said.out, on_cpu.out);
    }
}

#[test]
fn a_model_that_does_not_fit_is_shared_with_the_cpu_where_that_pays() {
    let [_, both] = libraries();
    let on_cpu = run(both, &[], &short(&["--backend", "cpu"]));
    // Room for what every token reads, some of the experts, and a context.
    let free = ("FAKE_FREE", "20000000");
    let small = short(&["-b", "64"]);
    let shared = run(both, &[free], &small);
    assert_eq!(shared.code, Some(0), "{}", shared.err);
    assert_ne!(shared.out, on_cpu.out, "the fake device computes nothing");
    let lines: Vec<&str> = shared.err.lines().filter(|line| line.contains("computing on")).collect();
    let [line] = lines[..] else { panic!("one line: {}", shared.err) };
    for part in [
        "computing on Fake A and the CPU, ",
        " tok/s expected, ",
        " on the CPU alone (--backend cpu selects that): ",
        " of weights that every token uses and the routed experts of ",
        " stay in host memory; a context of 64 positions",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    // Where the CPU is expected to be faster, it computes alone, and whoever names the GPU gets both.
    let slow = [free, ("FAKE_CLOCK", "1")];
    let said = run(both, &slow, &small);
    assert_eq!((said.code, &said.out), (Some(0), &on_cpu.out), "{}", said.err);
    let why = "computing on the CPU: the model does not fit Fake A, and the CPU is expected to be faster alone: ";
    assert!(said.err.contains(why) && said.err.contains("(--backend cuda uses both)"), "{}", said.err);
    let named = run(both, &slow, &[&small[..], &["--backend", "cuda"]].concat());
    assert!(named.code == Some(0) && named.out == shared.out, "{}", named.err);
    assert!(named.err.contains("stay in host memory") && !named.err.contains("computing on"), "{}", named.err);
    // Experts that move, and the steps around them.
    for moves in ["always", "never"] {
        let args = [&small[..], &["--backend", "cuda", "--hot-experts", moves]].concat();
        let said = run(both, &[free], &args);
        assert!(said.code == Some(0) && said.out == shared.out, "{moves}: {}", said.err);
    }
    // The CPU alone, where it is named, is not asked how fast it is.
    let cpu = run(both, &[free], &[&small[..], &["--backend", "cpu"]].concat());
    assert!(cpu.out == on_cpu.out && !cpu.err.contains("expected"), "{}", cpu.err);
    // A device that fails to start such a program leaves it to the CPU.
    let said = run(both, &[free, ("FAKE_EVENT_FAILS", "1")], &small);
    assert_eq!((said.code, &said.out), (Some(0), &on_cpu.out), "{}", said.err);
}

#[test]
fn experts_that_neither_gpu_nor_memory_holds_are_read_from_disk() {
    let [_, both] = libraries();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    let with = |gpu, memory| {
        let more = ["-b", "64", "--backend", "cuda", "--gpu-memory", gpu, "--memory", memory];
        run(both, &[], &[SHORT, &more, &["-m", model]].concat())
    };
    let shared = with("212M", "1G");
    assert!(shared.code == Some(0) && shared.err.contains("stay in host memory"), "{}", shared.err);
    let little = with("212M", "10M");
    let why = "--memory 10.0 MB is too little: this model needs at least ";
    assert!(little.code == Some(1) && little.err.contains(why), "{}", little.err);
    // How much that is depends on what this process takes besides; not all experts fit into a few megabytes more.
    let least = little.err.split(why).nth(1).and_then(|rest| rest.split_once("M (")?.0.parse::<u32>().ok());
    let least = least.unwrap_or_else(|| panic!("{}", little.err));
    let streamed = with("212M", &format!("{}M", least + 4));
    assert_eq!((streamed.code, &streamed.out), (Some(0), &shared.out), "{}", streamed.err);
    for part in [" are read from disk, except for ", "experts: ", " per token · "] {
        assert!(streamed.err.contains(part), "{part}: {}", streamed.err);
    }
}

#[test]
fn a_device_is_chosen_by_its_number() {
    let [_, both] = libraries();
    let two = ("FAKE_DEVICES", "2");
    let said = run(both, &[two], &short(&["--device", "1"]));
    assert!(said.code == Some(0) && said.err.contains("computing on Fake B"), "{}", said.err);
    let said = run(both, &[two, ("MOEBIUS_DEVICE", "1")], SHORT);
    assert!(said.code == Some(0) && said.err.contains("computing on Fake B"), "{}", said.err);
    for backend in [&["--device", "2"][..], &["--device", "2", "--backend", "cuda"]] {
        let said = run(both, &[two], &short(backend));
        assert_eq!(said.code, Some(1));
        assert!(said.err.contains("there is no CUDA device 2: there are 0 (Fake A), 1 (Fake B)"), "{}", said.err);
    }
    let listed = run(both, &[two], &["devices"]).out;
    assert!(listed.contains("cuda:0: Fake A") && listed.contains("cuda:1: Fake B"), "{listed}");
}

#[test]
fn a_fault_of_the_device_ends_the_answer_with_an_error_that_names_it() {
    let [_, both] = libraries();
    for (setting, why) in [
        (("FAKE_LAUNCH_FAULTS", "1"), "an illegal memory access was encountered"),
        (("FAKE_LAUNCH_FAULTS", "200"), "an illegal memory access was encountered"),
        (("FAKE_LOST", "1"), "busy or unavailable"),
        (("FAKE_LOST", "3"), "busy or unavailable"),
    ] {
        let long = ["run", "--raw", "Once", "-n", "30", "--temperature", "0", "--ignore-eos", "-c", "64"];
        let (good, said) = (run(both, &[], &long), run(both, &[setting], &long));
        assert_eq!(good.code, Some(0), "{}", good.err);
        assert_eq!(said.code, Some(1), "{setting:?}: {}", said.err);
        assert!(said.err.contains("Fake A") && said.err.contains(why), "{setting:?}: {}", said.err);
        assert!(good.out.starts_with(said.out.trim_end_matches('\n')), "{setting:?}: {:?} {:?}", good.out, said.out);
    }
}

#[test]
fn what_a_step_dispatches_is_printed_without_a_mac() {
    let said = run(Path::new("/nowhere"), &[], &["plan", "--backend", "metal"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for part in ["dispatches for one token on Apple GPUs", "layers 4 to 5, each: 10 dispatches, 10 barriers", "| route"]
    {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    assert!(said.out.contains("  a token of each of 4 sequences: ") && said.out.contains("  a prompt of "));
    let refused = run(Path::new("/nowhere"), &[], &["plan", "--backend", "metal", "--sm", "90"]);
    assert!(refused.err.contains("--sm and --cubins require --backend cuda"), "{}", refused.err);
}

/// Who names Metal is told in one sentence that there is none; who does not gets the CPU.
#[test]
fn without_a_metal_device_there_is_one_sentence_or_the_cpu() {
    let with = |args: &[&str]| run(Path::new("/nowhere"), &[("CUDA_VISIBLE_DEVICES", "")], &short(args));
    let named = with(&["--backend", "metal"]);
    assert_eq!((named.code, named.out.as_str()), (Some(1), ""), "{}", named.err);
    let sentences: Vec<&str> = named.err.lines().filter(|line| line.contains("Metal")).collect();
    let sentence = "moebius: failed to use Metal: Metal is there on macOS alone (--backend cpu selects the CPU)";
    assert_eq!(sentences, [sentence], "{}", named.err);
    assert_eq!(named.err.lines().last(), Some(sentence), "{}", named.err);
    let on_cpu = with(&["--backend", "cpu"]);
    assert!(on_cpu.code == Some(0) && !on_cpu.out.is_empty(), "{}", on_cpu.err);
    // Who asks for a GPU is told why none computes.
    for (args, is_told) in [(&[][..], false), (&["--backend", "auto"], true)] {
        let said = with(args);
        assert_eq!((said.code, &said.out), (Some(0), &on_cpu.out), "{args:?}: {}", said.err);
        let tells = said.err.contains("computing on the CPU: the NVIDIA driver (libcuda) is not installed");
        assert!(!said.err.contains("Metal") && tells == is_told, "{args:?}: {}", said.err);
    }
}

#[test]
fn what_a_step_launches_is_printed_without_a_device() {
    let nowhere = Path::new("/nowhere");
    let said = run(nowhere, &[], &["plan", "--backend", "cuda", "--sm", "90"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for part in
        ["launches for one token on compute capability 9.0", "layer 0: 6 launches, ", "  a token: 5", "B shared"]
    {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    for (args, why) in [
        (&["plan", "--backend", "cuda"][..], "the NVIDIA driver (libcuda) is not installed (--sm 90 needs no device)"),
        (&["plan", "--backend", "cuda", "--sm", "75"], "without a device, 80, 86, 89, 90, 100 and 120 are supported"),
        (&["plan", "--sm", "90"], "--sm and --cubins require --backend cuda"),
        (&["plan", "--backend", "cuda", "--sm", "90", "--cubins", "/x"], "(NVRTC) is not installed"),
    ] {
        let said = run(nowhere, &[], args);
        assert!(said.code == Some(1) && said.err.contains(why), "{args:?}: {}", said.err);
    }
    // A device that is there says itself what it is.
    let [driver, _] = libraries();
    let said = run(driver, &[("FAKE_ARCH", "89")], &["plan", "--backend", "cuda"]);
    assert!(said.out.contains("launches for one token on compute capability 8.9"), "{}", said.out);
}

#[test]
fn kernels_that_were_compiled_ahead_need_no_compiler() {
    let [driver, both] = libraries();
    let folder = driver.join("ahead");
    let path = folder.to_str().expect("a path");
    let made = run(both, &[], &["plan", "--backend", "cuda", "--sm", "90", "--cubins", path]);
    assert!(made.code == Some(0) && made.out.contains(" modules for compute capability 90"), "{}", made.err);
    let n = std::fs::read_dir(&folder).expect("a folder").count();
    assert!(made.out.starts_with(&n.to_string()), "{n} files: {}", made.out);
    let said = run(driver, &[("MOEBIUS_CUBINS", path)], SHORT);
    assert!(said.code == Some(0) && said.err.contains("computing on Fake A"), "{}", said.err);
    let devices = run(driver, &[("MOEBIUS_CUBINS", path)], &["devices"]);
    assert!(devices.out.contains(&format!(" free: usable with the kernels in {path}")), "{}", devices.out);
    // Another card has none among them.
    let other = [("MOEBIUS_CUBINS", path), ("FAKE_ARCH", "89")];
    let said = run(driver, &other, &short(&["--backend", "cuda"]));
    assert_eq!(said.code, Some(1));
    let why =
        format!("on compute capability 8.9: it is not among the kernels in {path}, and NVIDIA's run-time compiler");
    assert!(said.err.contains(&why), "{}", said.err);
    // One that was cut short counts as absent. A run needs most of them: those for other steps are there too.
    for file in std::fs::read_dir(&folder).expect("a folder") {
        let path = file.expect("a file").path();
        let bytes = std::fs::read(&path).expect("bytes");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("write");
    }
    let said = run(driver, &[("MOEBIUS_CUBINS", path)], &short(&["--backend", "cuda"]));
    assert!(said.code == Some(1) && said.err.contains("it is not among the kernels in"), "{}", said.err);
}

/// A server of the fake device, stopped in the end, and its address.
struct Server(Child, String);

impl Server {
    fn start(libraries: &Path, settings: &[(&str, &str)], args: &[&str]) -> Server {
        let args = [&["serve", "--port", "0"], args].concat();
        let mut child = command(libraries, settings, &args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start moebius");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let address = line.trim().rsplit_once("http://").expect("an address").1.to_string();
        Server(child, address)
    }

    /// Stops the server in order, so that it writes its whole log; what it has logged.
    fn log(&mut self) -> String {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
        let mut log = String::new();
        self.0.stderr.take().expect("stderr").read_to_string(&mut log).expect("text");
        log
    }

    /// What the server says to a chat with these fields, on a thread of its own.
    fn chat(&self, fields: String) -> JoinHandle<String> {
        let address = self.1.clone();
        std::thread::spawn(move || {
            let body = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"Go on\"}}], {fields}}}");
            let mut stream = TcpStream::connect(address).expect("connect");
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
            write!(
                stream,
                "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .expect("send");
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            answer
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Copies of the embedded model under these names, in a folder of its own beside the libraries.
fn copies<const N: usize>(libraries: &Path, folder: &str, names: [&str; N]) -> [String; N] {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    let folder = libraries.join(folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    names.map(|name| {
        let path = folder.join(format!("{name}.gguf"));
        std::fs::copy(model, &path).expect("a copy");
        path.to_str().expect("a path").to_string()
    })
}

/// Two models that each leave experts to the CPU, with clients to both: calls of one that wait until the device is idle
/// meet waits of the other for its host.
#[test]
fn models_shared_with_the_cpu_do_not_wait_for_each_other() {
    let [_, both] = libraries();
    let [a, b] = copies(both, "shared", ["a", "b"]);
    // The first would take what both have: each has its half by a preset.
    let config = both.join("shared/config.toml");
    let preset = |name: &str| format!("[preset.{name}]\ngpu-memory = \"220M\"\n");
    let text = format!("gpu-memory = \"440M\"\n{}{}", preset("a"), preset("b"));
    std::fs::write(&config, text).expect("a file");
    let config = config.to_str().expect("a path");
    let args = ["-m", &a, "-m", &b, "--backend", "cuda", "--parallel", "4", "--ctx", "512"];
    let args = [&args[..], &["-b", "64", "--threads", "2", "--log-level", "info"]].concat();
    let mut server = Server::start(both, &[("FAKE_SYNCS", "100"), ("MOEBIUS_CONFIG", config)], &args);
    let ask = |i: usize| {
        let (model, tokens) = (["a", "b"][i % 2], 100 + 40 * i);
        server.chat(format!("\"model\": \"{model}\", \"ignore_eos\": true, \"max_tokens\": {tokens}"))
    };
    let clients: Vec<_> = (0..8).map(ask).collect();
    for (i, client) in clients.into_iter().enumerate() {
        let answer = client.join().expect("a client");
        let wanted = format!("\"completion_tokens\":{}", 100 + 40 * i);
        assert!(answer.contains(&wanted), "{i}: {answer}");
    }
    let log = server.log();
    assert_eq!(log.matches("stay in host memory").count(), 2, "{log}");
    assert!(!log.contains("unloaded"), "both are loaded at a time: {log}");
}

/// `--gpu-memory` is kept by all models of a server together: what does not fit beside one takes its place.
#[test]
fn the_promise_of_gpu_memory_is_that_of_the_server() {
    /// What every program keeps for its kernels.
    const KERNELS: usize = 192 << 20;
    let [_, both] = libraries();
    let [a, b] = copies(both, "promise", ["a", "b"]);
    for (promise, together) in [(260_000_000, false), (520_000_000, true)] {
        // The device has no byte more than is promised to programs.
        let free = (promise - KERNELS * if together { 2 } else { 1 }).to_string();
        let size = promise.to_string();
        let args = ["-m", &a, "-m", &b, "--gpu-memory", &size, "--parallel", "2", "--ctx", "512"];
        let args = [&args[..], &["-b", "64", "--threads", "2", "--log-level", "info"]].concat();
        let mut server = Server::start(both, &[("FAKE_FREE", &free)], &args);
        for model in ["a", "b", "a"] {
            let answer = server.chat(format!("\"model\": \"{model}\", \"max_tokens\": 3")).join().expect("a client");
            assert!(answer.contains("\"completion_tokens\":3"), "{promise}, {model}: {answer}");
        }
        let log = server.log();
        let held = log.lines().filter_map(|line| line.split_once("gpu_bytes=")?.1.split(' ').next()?.parse().ok());
        let held: Vec<usize> = held.collect();
        let unloaded = log.matches("unloaded").count();
        assert_eq!((held.len(), unloaded), if together { (2, 0) } else { (3, 2) }, "{log}");
        assert!(held.iter().all(|&bytes| bytes > KERNELS && bytes <= promise), "{held:?}");
        assert!(!together || held.iter().sum::<usize>() <= promise, "{held:?}");
    }
    // A promise that no model keeps is refused with what would do.
    let mut server = Server::start(both, &[], &["-m", &a, "-m", &b, "--gpu-memory", "1M", "--ctx", "512"]);
    let answer = server.chat("\"model\": \"b\", \"max_tokens\": 3".into()).join().expect("a client");
    assert!(answer.contains("is too little: this model needs at least "), "{answer}");
    server.log();
}

#[test]
fn a_server_whose_device_fails_tells_its_clients_and_ends() {
    let [_, both] = libraries();
    let args = ["--parallel", "4", "--ctx", "512", "--log-level", "error"];
    let mut server = Server::start(both, &[("FAKE_LAUNCH_FAULTS", "3000")], &args);
    let ask = |_| server.chat("\"stream\": true, \"ignore_eos\": true, \"max_tokens\": 400".into());
    let clients: Vec<_> = (0..3).map(ask).collect();
    let answers: Vec<String> = clients.into_iter().map(|thread| thread.join().expect("a client")).collect();
    for answer in &answers {
        // One that comes when all is over finds nobody.
        let is_late = answer.is_empty() || answer.starts_with("HTTP/1.1 503");
        assert!(is_late || answer.contains("illegal memory access"), "{answer}");
        assert!(!answer.contains("[DONE]") || answer.contains("error"), "{answer}");
    }
    assert!(answers[0].contains("Fake A"), "{}", answers[0]);
    let status = server.0.wait().expect("the server ends by itself");
    let mut err = String::new();
    server.0.stderr.take().expect("stderr").read_to_string(&mut err).expect("text");
    assert_eq!(status.code(), Some(1), "{err}");
    assert!(err.contains("illegal memory access"), "{err}");
}
