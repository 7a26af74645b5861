/* What tests/header.rs compiles and runs: `program` asks the embedded model, `program hostile FILE` what must be
 * refused. Prints what came. */
#include "moebius.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);            \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

struct got {
    char text[1 << 16];
    size_t len;
    int pieces, most;
    moebius_model *model;
};

/* Collects pieces; wants no more than `most` of them where that is not 0. */
static int collect(const char *text, size_t len, void *user) {
    struct got *got = user;
    CHECK(strlen(text) <= len && text[len] == 0 && got->len + len < sizeof got->text);
    memcpy(got->text + got->len, text, len);
    got->text[got->len += len] = 0;
    return ++got->pieces == got->most;
}

/* Uses the model while it answers. */
static int nested(const char *text, size_t len, void *user) {
    struct got *got = user, inner = {.len = 0};
    (void)text, (void)len;
    CHECK(moebius_generate(got->model, "Hello", "{\"max_tokens\": 2}", collect, &inner, NULL) == MOEBIUS_OK);
    CHECK(inner.pieces > 0);
    return 1;
}

/* Errors are sentences. They are read after the call: C does not define the order of evaluation of arguments. */
static void must_fail(int status, char **error, const char *wanted) {
    CHECK(status == MOEBIUS_FAILED && *error != NULL && strchr(*error, ' ') != NULL);
    if (!strstr(*error, wanted)) {
        fprintf(stderr, "%s\nwanted: %s\n", *error, wanted);
        exit(1);
    }
    moebius_free_text(*error);
    *error = NULL;
}

static void hostile(const char *file) {
    const char *flags[] = {"-m", file}, *wrong[] = {"--no-such-flag"}, *odd[] = {"-m", "\xff\xfe"}, *none[] = {NULL};
    char *error = NULL;
    CHECK(moebius_open(flags, 2, &error) == NULL);
    must_fail(MOEBIUS_FAILED, &error, file);
    CHECK(moebius_open(wrong, 1, &error) == NULL);
    must_fail(MOEBIUS_FAILED, &error, "--no-such-flag");
    CHECK(moebius_open(odd, 2, &error) == NULL);
    must_fail(MOEBIUS_FAILED, &error, "UTF-8");
    CHECK(moebius_open(none, 1, &error) == NULL);
    must_fail(MOEBIUS_FAILED, &error, "NULL");
    CHECK(moebius_open(NULL, 1, &error) == NULL);
    must_fail(MOEBIUS_FAILED, &error, "NULL");
    CHECK(moebius_open(flags, 2, NULL) == NULL);
    must_fail(moebius_generate(NULL, "a", NULL, collect, NULL, &error), &error, "NULL");
    must_fail(moebius_request(NULL, "/health", NULL, NULL, collect, NULL, &error), &error, "NULL");
    must_fail(moebius_logits(NULL, NULL, 1, NULL, 1, &error), &error, "NULL");
    CHECK(moebius_n_vocab(NULL) == 0 && moebius_n_ctx(NULL) == 0);
    moebius_close(NULL);
    moebius_free_text(NULL);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "hostile")) {
        hostile(argv[2]);
        return 0;
    }
    const char *flags[] = {"--ctx", "512", "--threads", "2"};
    const char *settings = "{\"max_tokens\": 24, \"temperature\": 0}";
    char *error = NULL;
    moebius_model *model = moebius_open(flags, 4, &error);
    if (!model) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    CHECK(error == NULL && strchr(moebius_version(), '.'));
    size_t n_vocab = moebius_n_vocab(model);
    CHECK(n_vocab == 8192 && moebius_n_ctx(model) == 512);

    static struct got whole, again, part, within, body;
    CHECK(moebius_generate(model, "Tell me a story", settings, collect, &whole, &error) == MOEBIUS_OK && !error);
    CHECK(moebius_generate(model, "Tell me a story", settings, collect, &again, &error) == MOEBIUS_OK);
    CHECK(whole.pieces > 1 && whole.len > 20 && !strcmp(whole.text, again.text));
    part.most = 1;
    CHECK(moebius_generate(model, "Tell me a story", settings, collect, &part, &error) == MOEBIUS_STOPPED && !error);
    CHECK(part.pieces == 1 && part.len < whole.len && !strncmp(part.text, whole.text, part.len));
    within.model = model;
    CHECK(moebius_generate(model, "Hello", settings, nested, &within, &error) == MOEBIUS_STOPPED);

    /* The numbers are those of the likeliest tokens. */
    uint32_t tokens[] = {1, 5, 300};
    float *logits = malloc(3 * n_vocab * sizeof *logits);
    CHECK(moebius_logits(model, tokens, 3, logits, 3 * n_vocab, &error) == MOEBIUS_OK);
    size_t best = 0;
    for (size_t i = 0; i < 3 * n_vocab; i++) CHECK(isfinite(logits[i]));
    for (size_t i = 0; i < n_vocab; i++) best = logits[2 * n_vocab + i] > logits[2 * n_vocab + best] ? i : best;
    printf("%zu\n", best);
    must_fail(moebius_logits(model, tokens, 3, logits, n_vocab, &error), &error, "expected 3 rows of 8192");
    must_fail(moebius_logits(model, tokens, 0, logits, 0, &error), &error, "0 tokens");
    must_fail(moebius_logits(model, tokens, (size_t)1 << 40, logits, n_vocab, &error), &error, "expected 1 to 512");
    tokens[1] = 1 << 30;
    must_fail(moebius_logits(model, tokens, 3, logits, 3 * n_vocab, &error), &error, "token 1073741824");
    must_fail(moebius_logits(model, NULL, 3, logits, 3 * n_vocab, &error), &error, "NULL");
    free(logits);

    int status = 0;
    CHECK(moebius_request(model, "/v1/completions",
                          "{\"prompt\": [1, 5, 300], \"max_tokens\": 1, \"temperature\": 0, \"logprobs\": 1}", &status,
                          collect, &body, &error) == MOEBIUS_OK);
    CHECK(status == 200 && strstr(body.text, "\"logprobs\""));
    body.len = 0;
    CHECK(moebius_request(model, "/v1/completions", "{\"prompt\": 7", &status, collect, &body, &error) == MOEBIUS_OK);
    CHECK(status == 400 && strstr(body.text, "error"));
    body.len = 0;
    CHECK(moebius_request(model, "/v1/models", NULL, &status, collect, &body, NULL) == MOEBIUS_OK && status == 200);
    must_fail(moebius_request(model, "no path", NULL, &status, collect, &body, &error), &error, "no path");
    must_fail(moebius_request(model, "/v1/models", NULL, &status, NULL, NULL, &error), &error, "NULL");
    must_fail(moebius_generate(model, "Hello", "[1]", collect, &body, &error), &error, "settings");
    must_fail(moebius_generate(model, "Hello", "{\"temperature\": -3}", collect, &body, &error), &error, "temperature");
    must_fail(moebius_generate(model, NULL, NULL, collect, &body, &error), &error, "NULL");
    must_fail(moebius_generate(model, "\xff", NULL, collect, &body, &error), &error, "UTF-8");
    must_fail(moebius_generate(model, "Hello", settings, NULL, NULL, &error), &error, "NULL");
    moebius_close(model);
    printf("%s\n", whole.text);
    return 0;
}
