class Moebius < Formula
  desc "Runs mixture-of-experts language models on your own machine"
  homepage "https://github.com/@REPOSITORY@"
  version "@VERSION@"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    on_arm do
      url "@URL aarch64-apple-darwin.tar.gz@"
      sha256 "@SUM aarch64-apple-darwin.tar.gz@"
    end
    on_intel do
      url "@URL x86_64-apple-darwin.tar.gz@"
      sha256 "@SUM x86_64-apple-darwin.tar.gz@"
    end
  end

  on_linux do
    on_arm do
      url "@URL aarch64-unknown-linux-gnu.tar.gz@"
      sha256 "@SUM aarch64-unknown-linux-gnu.tar.gz@"
    end
    on_intel do
      url "@URL x86_64-unknown-linux-gnu.tar.gz@"
      sha256 "@SUM x86_64-unknown-linux-gnu.tar.gz@"
    end
  end

  def install
    libexec.install "moebius"
    # Kernels that were compiled ahead lie next to the program.
    libexec.install "cuda" if File.directory?("cuda")
    bin.install_symlink libexec/"moebius"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/moebius.bash" => "moebius"
    zsh_completion.install "completions/moebius.zsh" => "_moebius"
    fish_completion.install "completions/moebius.fish"
  end

  test do
    assert_match "Once upon a time", shell_output("#{bin}/moebius run --quiet -n 8 'Once upon a time' </dev/null")
  end
end
