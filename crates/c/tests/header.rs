//! The header as C and C++ compilers read it, and a C program that uses all of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const LIB: &str = include_str!("../src/lib.rs");
const HEADER: &str = include_str!("../include/moebius.h");

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The folder of the library, which cargo has built for this test.
fn library() -> PathBuf {
    let me = std::env::current_exe().expect("a test has a file");
    let name = format!("{}moebius_c{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let folder = me.ancestors().skip(1).find(|folder| folder.join(&name).exists());
    folder.unwrap_or_else(|| panic!("{name} is not beside {}", me.display())).to_path_buf()
}

#[test]
fn a_c_program_loads_asks_reads_logits_and_is_told_what_fails() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (program, library) = (folder.path().join("program"), library());
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"]).arg("-I").arg(here("include"));
    cc.arg(here("tests/program.c")).arg("-o").arg(&program).arg("-L").arg(&library).args(["-lmoebius_c", "-lm"]);
    run(cc.arg(format!("-Wl,-rpath,{}", library.display())));
    let broken = folder.path().join("broken.gguf");
    std::fs::write(&broken, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f").expect("write");
    run(Command::new(&program).arg("hostile").arg(&broken));
    run(Command::new(&program).arg("hostile").arg(folder.path().join("no.gguf")));

    let said = String::from_utf8(run(&mut Command::new(&program)).stdout).expect("UTF-8");
    let (best, story) = said.split_once('\n').expect("two lines");
    assert!(story.split_whitespace().count() > 5, "{story}");
    // The same token as in Rust.
    let local = moebius::local::Local::open(Vec::new()).expect("the embedded model");
    let row = local.logits(&[1, 5, 300], 0, 3).expect("logits").split_off(2 * 8192);
    let wanted = (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    assert_eq!(best, wanted.to_string());
}

#[test]
fn the_header_is_c_and_cpp_and_has_every_function() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (language, standard) in [("c", "-std=c99"), ("c++", "-std=c++11")] {
        let mut cc = Command::new("cc");
        cc.args(["-x", language, standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]);
        let file = folder.path().join("empty");
        std::fs::write(&file, "#include \"moebius.h\"\n#include \"moebius.h\"\n").expect("write");
        run(cc.arg("-I").arg(here("include")).arg(&file));
    }
    let functions: Vec<&str> =
        LIB.split("extern \"C\" fn ").skip(1).filter_map(|rest| rest.split('(').next()).collect();
    assert_eq!(functions.len(), LIB.matches("#[unsafe(no_mangle)]").count());
    for name in &functions {
        assert!(HEADER.contains(&format!("{name}(")), "{name} is not in the header");
    }
    let names = |text: &'static str| text.split(|c: char| !c.is_alphanumeric() && !"_(".contains(c));
    let declared = names(HEADER).filter_map(|word| word.split_once('(')).map(|(name, _)| name);
    let declared: Vec<&str> = declared.filter(|name| name.starts_with("moebius_")).collect();
    assert_eq!(declared.len(), functions.len());
    assert!(declared.iter().all(|name| functions.contains(name)), "{declared:?} {functions:?}");
}
