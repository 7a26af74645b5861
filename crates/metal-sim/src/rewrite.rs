//! From preprocessed Metal to C++ that clang compiles for this machine, line for line, with a table of its kernels.
//!
//! Metal is C++ with four things that C++ lacks: attributes of kernel parameters, threadgroup variables, literals that
//! are floats by default, and constructors of vectors. Each is rewritten token by token; all else stays.

use std::fmt::Write;

/// Where a kernel's parameter comes from, by its attribute; the numbers are `sim_builtin`'s in `runner.cpp`.
const ATTRIBUTES: &[(&str, u32)] = &[
    ("thread_position_in_grid", 2),
    ("thread_position_in_threadgroup", 3),
    ("threadgroup_position_in_grid", 4),
    ("threads_per_threadgroup", 5),
    ("threadgroups_per_grid", 6),
    ("threads_per_grid", 7),
    ("thread_index_in_threadgroup", 8),
    ("thread_index_in_simdgroup", 9),
    ("simdgroup_index_in_threadgroup", 10),
    ("simdgroups_per_threadgroup", 11),
    ("threads_per_simdgroup", 12),
];

/// Attributes above this one are single numbers; those up to it are positions, which Metal wants of one width.
const LAST_POSITION: u32 = 7;

/// A rewritten source.
#[derive(Clone, Debug)]
pub struct Rewritten {
    /// C++, without the table.
    pub body: String,
    /// The table of kernels, to be appended.
    pub table: String,
    /// Names of the kernels.
    pub kernels: Vec<String>,
}

/// What Metal would refuse, or what this subset of it lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {why}")]
pub struct Refused {
    /// Name of the source by its line markers.
    pub file: String,
    /// Line.
    pub line: usize,
    /// Why.
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Space,
    Text,
    Number,
    Word,
    Mark,
}

#[derive(Clone, Debug)]
struct Token {
    kind: Kind,
    text: String,
    line: usize,
    file: usize,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        self.text == text && self.kind != Kind::Text
    }
}

/// Rewrites a source that `clang -E` has preprocessed.
///
/// # Errors
/// [`Refused`].
pub fn rewrite(source: &str) -> Result<Rewritten, Refused> {
    let (tokens, files) = lex(source);
    let mut rewriter = Rewriter { tokens, files, kernels: Vec::new(), n_vars: 0 };
    rewriter.literals()?;
    rewriter.find_kernels()?;
    rewriter.threadgroup_variables()?;
    rewriter.constructors();
    let body = rewriter.tokens.iter().map(|t| t.text.as_str()).collect();
    let kernels = rewriter.kernels;
    Ok(Rewritten { body, table: table(&kernels), kernels: kernels.into_iter().map(|k| k.name).collect() })
}

/// Tokens, with the names of the files that line markers name.
fn lex(source: &str) -> (Vec<Token>, Vec<String>) {
    let mut files = vec!["source".to_string()];
    let mut tokens: Vec<Token> = Vec::new();
    let (mut line, mut file, mut rest, mut at_line_start) = (1, 0, source, true);
    // `]]` ends an attribute only where one is open.
    let mut open: Vec<bool> = Vec::new();
    while let Some(first) = rest.chars().next() {
        let marker = at_line_start && first == '#';
        let (kind, len) = if marker {
            (Kind::Space, rest.find('\n').map_or(rest.len(), |n| n + 1))
        } else {
            next_token(rest, open.last() == Some(&true))
        };
        let text = &rest[..len];
        match text {
            "[[" => open.push(true),
            "[" => open.push(false),
            "]" | "]]" => drop(open.pop()),
            _ => {}
        }
        tokens.push(Token { kind, text: text.into(), line, file });
        if marker {
            let mut words = text[1..].split_whitespace();
            let number = words.next().and_then(|word| word.parse::<usize>().ok());
            if let (Some(number), Some(name)) = (number, words.next()) {
                let name = name.trim_matches('"').to_string();
                file = files.iter().position(|known| *known == name).unwrap_or(files.len());
                if file == files.len() {
                    files.push(name);
                }
                line = number;
            } else {
                line += 1;
            }
        } else {
            line += text.matches('\n').count();
        }
        at_line_start = text.ends_with('\n') || (at_line_start && kind == Kind::Space);
        rest = &rest[len..];
    }
    (tokens, files)
}

/// Kind and length of the token that a text begins with; `in_attribute`: the innermost bracket is `[[`.
fn next_token(rest: &str, in_attribute: bool) -> (Kind, usize) {
    let first = rest.chars().next().unwrap_or(' ');
    let count =
        |from: usize, f: &dyn Fn(char) -> bool| from + rest[from..].find(|c| !f(c)).unwrap_or(rest.len() - from);
    let second = rest[first.len_utf8()..].chars().next().unwrap_or(' ');
    if first == '\n' {
        return (Kind::Space, 1);
    }
    if first.is_whitespace() {
        return (Kind::Space, count(0, &|c| c.is_whitespace() && c != '\n'));
    }
    if first == '"' || first == '\'' {
        let mut escaped = false;
        let end = rest[1..].find(|c| {
            let ends = c == first && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        return (Kind::Text, end.map_or(rest.len(), |n| n + 2));
    }
    if first.is_ascii_digit() || (first == '.' && second.is_ascii_digit()) {
        // A sign belongs to a number behind the mark of its exponent.
        let bytes = rest.as_bytes();
        let is_hex = rest.starts_with("0x") || rest.starts_with("0X");
        let mut n = 0;
        while let Some(&b) = bytes.get(n) {
            let exponent = n > 0 && matches!((bytes[n - 1], is_hex), (b'e' | b'E', false) | (b'p' | b'P', true));
            if !(b.is_ascii_alphanumeric() || b == b'.' || ((b == b'+' || b == b'-') && exponent)) {
                break;
            }
            n += 1;
        }
        return (Kind::Number, n);
    }
    if first.is_alphabetic() || first == '_' {
        return (Kind::Word, count(0, &|c| c.is_alphanumeric() || c == '_'));
    }
    let two = ["::", "->", "[["].iter().any(|two| rest.starts_with(two)) || (in_attribute && rest.starts_with("]]"));
    (Kind::Mark, if two { 2 } else { first.len_utf8() })
}

/// A kernel and where its parameters come from: 0 and a slot, or a number of [`ATTRIBUTES`].
struct Kernel {
    name: String,
    params: Vec<(u32, u32)>,
}

struct Rewriter {
    tokens: Vec<Token>,
    files: Vec<String>,
    kernels: Vec<Kernel>,
    n_vars: usize,
}

impl Rewriter {
    fn refuse(&self, at: usize, why: impl Into<String>) -> Refused {
        let token = &self.tokens[at.min(self.tokens.len() - 1)];
        Refused { file: self.files[token.file].clone(), line: token.line, why: why.into() }
    }

    /// The next token behind `at` that is no space.
    fn next(&self, at: usize) -> usize {
        (at + 1..self.tokens.len()).find(|&i| self.tokens[i].kind != Kind::Space).unwrap_or(self.tokens.len())
    }

    fn is(&self, at: usize, text: &str) -> bool {
        self.tokens.get(at).is_some_and(|t| t.is(text))
    }

    fn text(&self, range: std::ops::Range<usize>) -> String {
        let text: String = self.tokens[range].iter().map(|t| t.text.as_str()).collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Removes tokens and keeps their lines.
    fn blank(&mut self, range: std::ops::Range<usize>) {
        for token in &mut self.tokens[range] {
            token.text = "\n".repeat(token.text.matches('\n').count());
            token.kind = Kind::Space;
        }
    }

    /// The token that closes the bracket at `at`.
    fn closing(&self, at: usize) -> Result<usize, Refused> {
        let mut depth = 0usize;
        for i in at..self.tokens.len() {
            if self.tokens[i].kind == Kind::Mark {
                match self.tokens[i].text.as_str() {
                    "(" | "[" | "[[" | "{" => depth += 1,
                    ")" | "]" | "]]" | "}" => depth = depth.saturating_sub(1),
                    _ => continue,
                }
                if depth == 0 {
                    return Ok(i);
                }
            }
        }
        Err(self.refuse(at, "a bracket is not closed"))
    }

    /// Numbers with a point or an exponent are floats, those that end in `h` halves.
    fn literals(&mut self) -> Result<(), Refused> {
        for i in 0..self.tokens.len() {
            let token = &self.tokens[i];
            if token.kind == Kind::Word && token.text == "double" {
                return Err(self.refuse(i, "Metal has no double"));
            }
            if token.kind != Kind::Number || token.text.starts_with("0x") || token.text.starts_with("0X") {
                continue;
            }
            let text = &token.text;
            let new = match text.strip_suffix(['h', 'H']) {
                Some(number) => format!("((half){number}f)"),
                None if text.contains(['.', 'e', 'E']) && !text.ends_with(['f', 'F']) => format!("{text}f"),
                None => continue,
            };
            self.tokens[i].text = new;
        }
        Ok(())
    }

    /// `kernel void name(parameters) {`: takes the attributes out and notes them.
    fn find_kernels(&mut self) -> Result<(), Refused> {
        for i in 0..self.tokens.len() {
            if !(self.tokens[i].kind == Kind::Word && self.tokens[i].text == "kernel") {
                continue;
            }
            let void = self.next(i);
            let name = self.next(void);
            let open = self.next(name);
            if !self.is(void, "void") || !self.is(open, "(") {
                return Err(self.refuse(i, "a kernel is written `kernel void name(..)`, without templates"));
            }
            let close = self.closing(open)?;
            if !self.is(self.next(close), "{") {
                return Err(self.refuse(i, "a kernel is declared where it is defined"));
            }
            let kernel = Kernel { name: self.tokens[name].text.clone(), params: self.params(open, close)? };
            if self.kernels.iter().any(|other| other.name == kernel.name) {
                return Err(self.refuse(i, format!("two kernels are called {}", kernel.name)));
            }
            self.kernels.push(kernel);
        }
        Ok(())
    }

    fn params(&mut self, open: usize, close: usize) -> Result<Vec<(u32, u32)>, Refused> {
        // Commas outside of brackets part the parameters.
        let (mut parts, mut depth, mut from) = (Vec::new(), 0usize, open + 1);
        for i in open + 1..close {
            match self.tokens[i].text.as_str() {
                "(" | "[" | "[[" | "{" | "<" => depth += 1,
                ")" | "]" | "]]" | "}" | ">" => depth = depth.saturating_sub(1),
                "," if depth == 0 => {
                    parts.push((from, i));
                    from = i + 1;
                }
                _ => {}
            }
        }
        parts.push((from, close));
        let (mut params, mut width) = (Vec::new(), None);
        for (from, to) in parts {
            let Some(mark) = (from..to).find(|&i| self.is(i, "[[")) else {
                return Err(self.refuse(from, format!("parameter `{}` has no attribute", self.text(from..to))));
            };
            let end = self.closing(mark)?;
            let attribute = self.text(mark + 1..end).replace(' ', "");
            let declaration = self.text(from..mark);
            let spaces = ["device", "constant", "threadgroup"];
            let has_space = declaration.split(' ').any(|word| spaces.contains(&word));
            if let Some(slot) = attribute.strip_prefix("buffer(").and_then(|rest| rest.strip_suffix(')')) {
                let Some(slot) = slot.parse::<u32>().ok().filter(|&slot| slot < 31) else {
                    return Err(self.refuse(mark, format!("slot {slot} is not one of 0 to 30")));
                };
                if !has_space {
                    return Err(self.refuse(mark, format!("`{declaration}` names no address space")));
                }
                if params.contains(&(0, slot)) {
                    return Err(self.refuse(mark, format!("two parameters have slot {slot}")));
                }
                params.push((0, slot));
            } else if let Some(&(_, kind)) = ATTRIBUTES.iter().find(|(name, _)| *name == attribute) {
                let last = declaration.split(' ').next().unwrap_or_default().chars().last();
                let n = last.and_then(|c| c.to_digit(10)).unwrap_or(1);
                if kind <= LAST_POSITION && width.replace(n).is_some_and(|other| other != n) {
                    return Err(self.refuse(mark, "positions of different widths"));
                }
                params.push((kind, 0));
            } else {
                return Err(self.refuse(mark, format!("attribute [[{attribute}]] is not supported")));
            }
            self.blank(mark..end + 1);
        }
        Ok(params)
    }

    /// `threadgroup T name[n];` in a function becomes a reference to memory of the threadgroup.
    fn threadgroup_variables(&mut self) -> Result<(), Refused> {
        let (mut depth, mut before) = (0usize, String::new());
        let mut i = 0;
        while i < self.tokens.len() {
            let token = &self.tokens[i];
            if token.kind == Kind::Space {
                i += 1;
                continue;
            }
            match token.text.as_str() {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            let starts = matches!(before.as_str(), "{" | "}" | ";");
            if depth > 0 && starts && token.is("threadgroup") {
                let end = (i..self.tokens.len()).find(|&j| self.is(j, ";")).unwrap_or(self.tokens.len() - 1);
                let declaration = self.text(i + 1..end);
                // Pointers and references to such memory are ordinary variables.
                let ty_and_name = declaration.split('[').next().unwrap_or_default();
                if !ty_and_name.contains(['*', '&']) {
                    let code = self.variables(i, &declaration)?;
                    self.blank(i..end + 1);
                    self.tokens[i].text.insert_str(0, &code);
                    before = ";".into();
                    i = end + 1;
                    continue;
                }
            }
            before = self.tokens[i].text.clone();
            i += 1;
        }
        Ok(())
    }

    fn variables(&mut self, at: usize, declaration: &str) -> Result<String, Refused> {
        let refused = self.refuse(at, format!("`threadgroup {declaration}` is not `threadgroup TYPE NAME[..], ..`"));
        if declaration.contains('=') {
            return Err(self.refuse(at, "threadgroup variables have no initialisers"));
        }
        let (ty, names) = declaration.split_once(' ').ok_or(refused.clone())?;
        let line = self.tokens[at].line;
        let mut code = String::new();
        for name in names.split(',').map(str::trim) {
            let (name, array) = name.split_at(name.find('[').unwrap_or(name.len()));
            let name = name.trim();
            if !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
                return Err(refused);
            }
            let id = self.n_vars;
            self.n_vars += 1;
            let _ = write!(code, "auto& {name} = ::sim::tgvar<{ty} {array}>({id}, \"{name}\", {line}); ");
        }
        Ok(code)
    }

    /// `float4(a, b)` is a constructor in Metal and a cast of the last value in clang.
    fn constructors(&mut self) {
        const ELEMENTS: [&str; 11] =
            ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half", "bool"];
        for i in 0..self.tokens.len() {
            let token = &self.tokens[i];
            let is_vector = token.kind == Kind::Word
                && token.text.strip_suffix(['2', '3', '4']).is_some_and(|element| ELEMENTS.contains(&element));
            if is_vector && self.is(self.next(i), "(") {
                self.tokens[i].text = format!("msl_mk<{}>", self.tokens[i].text);
            }
        }
    }
}

/// The table of kernels that the runner reads.
fn table(kernels: &[Kernel]) -> String {
    let mut out = String::from("\n#line 1 \"table of kernels\"\n");
    let mut rows = Vec::new();
    for (i, Kernel { name, params }) in kernels.iter().enumerate() {
        let places: Vec<String> = params.iter().map(|(kind, slot)| format!("{{{kind}, {slot}}}")).collect();
        let _ = write!(
            out,
            "static const sim::P sim_p{i}[] = {{{}}};\ntypedef sim::Info<decltype(&{name})> sim_i{i};\n\
             static MSL_NOTSAN void sim_r{i}(const sim::Ctx& c) {{ sim::call(&{name}, sim_p{i}, c); }}\n",
            places.join(", ")
        );
        rows.push(format!(
            "{{\"{name}\", sim_r{i}, sim_i{i}::n, sim_p{i}, sim_i{i}::size, sim_i{i}::ro, sim_i{i}::ref}}"
        ));
    }
    let n = rows.len();
    let _ = write!(
        out,
        "extern \"C\" {{ extern const sim::Kernel sim_kernels[]; extern const int sim_n_kernels;\n\
         const sim::Kernel sim_kernels[] = {{{}}};\nconst int sim_n_kernels = {n}; }}\n",
        rows.join(",\n")
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_rewrites_what_it_is_for() {
        let source = "# 1 \"a.metal\"\nkernel void f(device const float* x [[buffer(2)]],\n\
                      uint3 p [[threadgroup_position_in_grid]]) {\n threadgroup float s[4][2], t;\n\
                      half h = 0.5h; float y = 1.0 + 2e-3 + x[s[0][1]];\n float4 v = float4(1, 2.0f, y, 0x1e);\n}\n";
        let out = rewrite(source).unwrap();
        let body = &out.body;
        for piece in [
            "auto& s = ::sim::tgvar<float [4][2]>(0, \"s\", 3); auto& t = ::sim::tgvar<float >(1, \"t\", 3); ",
            "((half)0.5f)",
            "1.0f + 2e-3f + x[s[0][1]]",
            "msl_mk<float4>(1, 2.0f, y, 0x1e)",
        ] {
            assert!(body.contains(piece), "{piece} in\n{body}");
        }
        assert_eq!(body.matches('\n').count(), source.matches('\n').count());
        assert!(!body.contains("[["));
        assert_eq!(out.kernels, ["f"]);
        assert!(out.table.contains("{{0, 2}, {4, 0}}"), "{}", out.table);
    }

    #[test]
    fn what_metal_refuses_is_refused_by_its_line() {
        for (source, why) in [
            ("void g() { double x; }", "no double"),
            ("kernel void f(device float* x) {}", "no attribute"),
            ("kernel void f(float* x [[buffer(0)]]) {}", "address space"),
            ("kernel void f(device float* x [[buffer(31)]]) {}", "slot 31"),
            ("kernel void f(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) {}", "two parameters"),
            ("kernel void f(uint3 a [[thread_position_in_grid]], uint b [[threads_per_grid]]) {}", "widths"),
            ("kernel void f(uint a [[lucky_number]]) {}", "not supported"),
            ("kernel void f(uint a [[thread_index_in_simdgroup]]) { threadgroup float s = 1; }", "initialisers"),
            (
                "kernel void f(uint a [[thread_index_in_simdgroup]]) {} kernel void f(uint a [[threads_per_grid]]) {}",
                "two",
            ),
        ] {
            let refused = rewrite(&format!("# 7 \"b.metal\"\n{source}")).unwrap_err();
            assert!(refused.why.contains(why), "{source}: {refused}");
            assert_eq!((refused.file.as_str(), refused.line), ("b.metal", 7));
        }
    }
}
