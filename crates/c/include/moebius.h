/* Models in C programs: load, ask, read logits. Link with libmoebius_c.
 *
 * Texts are UTF-8 and end with a zero. A function that fails says why in *error, a sentence that the caller frees with
 * moebius_free_text; where it does not fail it sets *error to NULL. error itself may be NULL. Any number of threads may
 * use one model, and what they ask for is computed together; after a fork only the parent may. */
#ifndef MOEBIUS_H
#define MOEBIUS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A loaded model. */
typedef struct moebius_model moebius_model;

/* What functions return. */
enum {
    MOEBIUS_OK = 0,
    MOEBIUS_FAILED = 1,
    /* A callback wanted no more. */
    MOEBIUS_STOPPED = 2
};

/* Takes the next piece of an answer, of len bytes and a zero behind them, which is gone when it returns. Anything but 0
 * ends the answer. It may use the model, and must neither close it nor leave by longjmp or an exception. */
typedef int (*moebius_piece)(const char *text, size_t len, void *user);

/* "0.1.0"; not to be freed. */
const char *moebius_version(void);

/* Loads a model with flags of `moebius serve`, such as {"-m", "model.gguf", "--ctx", "4096"}; without -m the one that
 * comes with the library. NULL when that fails. */
moebius_model *moebius_open(const char *const *flags, size_t n_flags, char **error);

/* Ends the model and frees it; NULL is nothing. No other call may be under way. */
void moebius_close(moebius_model *model);

/* Tokens of the vocabulary: the length of a row of logits. */
size_t moebius_n_vocab(const moebius_model *model);

/* Most tokens of a prompt and its answer. */
size_t moebius_n_ctx(const moebius_model *model);

/* Answers a prompt piece by piece: as the user's message where the model has a chat template, as the beginning of a
 * text where it has none. settings is an object of JSON with fields of /v1/chat/completions or /v1/completions, such as
 * {"max_tokens": 64, "temperature": 0}; NULL for none. Thoughts and calls of tools are not among the pieces. */
int moebius_generate(moebius_model *model, const char *prompt, const char *settings, moebius_piece piece, void *user,
                     char **error);

/* Asks a route of the server, such as "/v1/embeddings", with a body of JSON, or with GET where body is NULL, and gives
 * the body of the answer in pieces as they come. *status is that of HTTP; an answer that says no is not a failure. */
int moebius_request(moebius_model *model, const char *path, const char *body, int *status, moebius_piece piece,
                    void *user, char **error);

/* Logits behind each of n tokens of a text: n rows of moebius_n_vocab floats in out, which has room for n_out. */
int moebius_logits(moebius_model *model, const uint32_t *tokens, size_t n, float *out, size_t n_out, char **error);

/* Frees an error; NULL is nothing. */
void moebius_free_text(char *text);

#ifdef __cplusplus
}
#endif

#endif
