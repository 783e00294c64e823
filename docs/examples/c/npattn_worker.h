/* The worker's side of docs/protocol.md: frames, JSON, tensors, and the loop that answers requests.
 *
 * C99, no dependency, a little-endian machine. Include it in one file that has the kernel and calls
 * npattn_serve in its main. The kernel prints to standard error: standard output has the frames.
 * All memory of a request comes from npattn_alloc, and is freed when it has been answered. */

#ifndef NPATTN_WORKER_H
#define NPATTN_WORKER_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NPATTN_RANK 8
#define NPATTN_TENSORS 32

/* --- memory and errors ------------------------------------------------------------------------ */

typedef struct npattn_block {
    struct npattn_block *next;
    void *unused; /* what follows is aligned as malloc aligns */
} npattn_block;

static npattn_block *npattn_blocks;
static jmp_buf npattn_failure;
static const char *npattn_kind; /* what was raised: the name of a built-in exception of Python */
static char npattn_text[1024];

/* End the process: the judge reports how, and the last lines of standard error. */
static void npattn_die(const char *text)
{
    fprintf(stderr, "npattn_worker: %s\n", text);
    exit(3);
}

/* Refuse the request, as Python raises an exception; kind is "ValueError", "TypeError" or "NotImplementedError". */
static void npattn_raise(const char *kind, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(npattn_text, sizeof npattn_text, format, arguments);
    va_end(arguments);
    npattn_kind = kind;
    longjmp(npattn_failure, 1);
}

/* Return memory filled with zeros, of which every byte is freed after the request. */
static void *npattn_alloc(size_t size)
{
    npattn_block *block = calloc(1, sizeof *block + size);
    if (!block)
        npattn_die("out of memory");
    block->next = npattn_blocks;
    npattn_blocks = block;
    return block + 1;
}

static void npattn_free_all(void)
{
    while (npattn_blocks) {
        npattn_block *next = npattn_blocks->next;
        free(npattn_blocks);
        npattn_blocks = next;
    }
}

/* --- JSON ------------------------------------------------------------------------------------- */

typedef enum { NPATTN_NULL, NPATTN_BOOL, NPATTN_NUMBER, NPATTN_TEXT, NPATTN_LIST, NPATTN_OBJECT } npattn_type;

typedef struct npattn_json {
    npattn_type type;
    double number;     /* of a number; 0 or 1 of a truth value */
    char *text;        /* of a text */
    char *name;        /* of a member of an object */
    struct npattn_json *first, *next; /* members, in order */
} npattn_json;

static void npattn_skip(const char **at)
{
    while (**at == ' ' || **at == '\n' || **at == '\r' || **at == '\t')
        ++*at;
}

static void npattn_expect(const char **at, const char *word)
{
    size_t length = strlen(word);
    if (strncmp(*at, word, length))
        npattn_die("the judge sent no JSON");
    *at += length;
}

/* Read a text into UTF-8; half of a surrogate pair becomes three bytes, as it is for nobody to read. */
static char *npattn_read_text(const char **at)
{
    char *text = npattn_alloc(strlen(*at) + 1), *end = text; /* an escape is longer than its meaning */
    npattn_expect(at, "\"");
    while (**at && **at != '"') {
        char c = *(*at)++;
        if (c != '\\') {
            *end++ = c;
            continue;
        }
        c = *(*at)++;
        if (c == 'u') {
            char digits[5] = {0};
            unsigned long code;
            strncpy(digits, *at, 4);
            code = strtoul(digits, NULL, 16);
            *at += strlen(digits);
            if (code < 0x80) {
                *end++ = (char)code;
            } else if (code < 0x800) {
                *end++ = (char)(0xc0 | code >> 6);
                *end++ = (char)(0x80 | (code & 0x3f));
            } else {
                *end++ = (char)(0xe0 | code >> 12);
                *end++ = (char)(0x80 | (code >> 6 & 0x3f));
                *end++ = (char)(0x80 | (code & 0x3f));
            }
        } else {
            const char *escapes = "n\nt\tr\rb\bf\f", *found = c ? strchr("ntrbf", c) : NULL;
            *end++ = found ? escapes[2 * (found - "ntrbf") + 1] : c;
        }
    }
    npattn_expect(at, "\"");
    return text;
}

static npattn_json *npattn_read_json(const char **at)
{
    npattn_json *value = npattn_alloc(sizeof *value), **last = &value->first;
    char close;
    npattn_skip(at);
    if (**at == '"') {
        value->type = NPATTN_TEXT;
        value->text = npattn_read_text(at);
    } else if (**at == '{' || **at == '[') {
        value->type = **at == '{' ? NPATTN_OBJECT : NPATTN_LIST;
        close = *(*at)++ == '{' ? '}' : ']';
        npattn_skip(at);
        while (**at != close) {
            char *name = NULL;
            if (close == '}') {
                name = npattn_read_text(at);
                npattn_skip(at);
                npattn_expect(at, ":");
            }
            *last = npattn_read_json(at);
            (*last)->name = name;
            last = &(*last)->next;
            npattn_skip(at);
            if (**at != close)
                npattn_expect(at, ",");
            npattn_skip(at);
        }
        ++*at;
    } else if (**at == 't' || **at == 'f') {
        value->type = NPATTN_BOOL;
        value->number = **at == 't';
        npattn_expect(at, **at == 't' ? "true" : "false");
    } else if (**at == 'n') {
        npattn_expect(at, "null");
    } else {
        char *end;
        value->type = NPATTN_NUMBER;
        value->number = strtod(*at, &end);
        if (end == *at)
            npattn_die("the judge sent no JSON");
        *at = end;
    }
    return value;
}

static npattn_json *npattn_parse(const char *text)
{
    return npattn_read_json(&text);
}

/* Return a member of an object; NULL if there is none, or if it is null. */
static npattn_json *npattn_get(const npattn_json *object, const char *name)
{
    npattn_json *member = object ? object->first : NULL;
    while (member && (!member->name || strcmp(member->name, name)))
        member = member->next;
    return member && member->type != NPATTN_NULL ? member : NULL;
}

static const char *npattn_get_text(const npattn_json *object, const char *name)
{
    npattn_json *member = npattn_get(object, name);
    return member && member->type == NPATTN_TEXT ? member->text : "";
}

/* A text that grows. */
typedef struct {
    char *bytes;
    size_t size, room;
} npattn_writer;

static void npattn_put(npattn_writer *writer, const char *format, ...)
{
    va_list arguments;
    int length;
    va_start(arguments, format);
    length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (writer->size + (size_t)length + 1 > writer->room) {
        size_t room = 2 * (writer->room + (size_t)length + 1);
        char *bytes = npattn_alloc(room);
        if (writer->size)
            memcpy(bytes, writer->bytes, writer->size);
        writer->bytes = bytes;
        writer->room = room;
    }
    va_start(arguments, format);
    vsnprintf(writer->bytes + writer->size, writer->room - writer->size, format, arguments);
    va_end(arguments);
    writer->size += (size_t)length;
}

static void npattn_put_text(npattn_writer *writer, const char *text)
{
    npattn_put(writer, "\"");
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            npattn_put(writer, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            npattn_put(writer, "\\u%04x", (unsigned)*text);
        else
            npattn_put(writer, "%c", *text);
    }
    npattn_put(writer, "\"");
}

/* --- tensors and frames ----------------------------------------------------------------------- */

typedef struct {
    const char *name, *dtype; /* dtype: "F32", "BOOL", ... as safetensors names it */
    int rank;
    size_t shape[NPATTN_RANK], count; /* count: of elements */
    void *data;                       /* contiguous, and yours to write to */
} npattn_tensor;

typedef struct {
    npattn_json *message;
    int count;
    npattn_tensor tensors[NPATTN_TENSORS];
} npattn_frame;

static size_t npattn_item_size(const char *dtype)
{
    const char *one = "BOOL I8 U8 F8_E4M3 F8_E5M2", *two = "F16 BF16 I16 U16", *four = "F32 I32 U32";
    return strstr(one, dtype) ? 1 : strstr(two, dtype) ? 2 : strstr(four, dtype) ? 4 : 8;
}

static size_t npattn_little(const unsigned char *bytes)
{
    uint64_t number = 0;
    for (int i = 7; i >= 0; i--)
        number = number << 8 | bytes[i];
    return (size_t)number;
}

/* Read a frame; 0 at the end of standard input. */
static int npattn_read(npattn_frame *frame)
{
    unsigned char bytes[8], *body;
    size_t length, size;
    npattn_json *header, *entry, *item;
    char *text;
    if (fread(bytes, 1, 8, stdin) != 8)
        return 0;
    length = npattn_little(bytes);
    body = npattn_alloc(length);
    if (length < 8 || fread(body, 1, length, stdin) != length)
        return 0;
    size = npattn_little(body);
    if (size > length - 8)
        npattn_die("a header is longer than its frame");
    text = npattn_alloc(size + 1);
    memcpy(text, body + 8, size);
    header = npattn_parse(text);
    frame->message = npattn_parse(npattn_get_text(npattn_get(header, "__metadata__"), "npattn"));
    frame->count = 0;
    for (entry = header->first; entry; entry = entry->next) {
        npattn_tensor *tensor = &frame->tensors[frame->count];
        npattn_json *offsets = npattn_get(entry, "data_offsets"), *shape = npattn_get(entry, "shape");
        size_t begin, bytes_of_it;
        if (!offsets || !shape)
            continue; /* __metadata__ */
        if (frame->count++ == NPATTN_TENSORS)
            npattn_die("a frame has too many tensors");
        tensor->name = entry->name;
        tensor->dtype = npattn_get_text(entry, "dtype");
        tensor->rank = 0;
        tensor->count = 1;
        for (item = shape->first; item; item = item->next) {
            if (tensor->rank == NPATTN_RANK)
                npattn_die("a tensor has too many axes");
            tensor->shape[tensor->rank++] = (size_t)item->number;
            tensor->count *= (size_t)item->number;
        }
        begin = (size_t)offsets->first->number;
        bytes_of_it = tensor->count * npattn_item_size(tensor->dtype);
        if (8 + size + begin + bytes_of_it > length)
            npattn_die("a tensor is longer than its frame");
        tensor->data = npattn_alloc(bytes_of_it); /* aligned, which in the frame it may not be */
        memcpy(tensor->data, body + 8 + size + begin, bytes_of_it);
    }
    return 1;
}

static void npattn_write_length(uint64_t number)
{
    for (int i = 0; i < 8; i++)
        putchar((int)(number >> 8 * i & 0xff));
}

static void npattn_write(const char *message, const npattn_frame *frame)
{
    npattn_writer header = {0};
    size_t end = 0;
    npattn_put(&header, "{\"__metadata__\": {\"npattn\": ");
    npattn_put_text(&header, message);
    npattn_put(&header, "}");
    for (int n = 0; n < frame->count; n++) {
        const npattn_tensor *tensor = &frame->tensors[n];
        size_t begin = end;
        end += tensor->count * npattn_item_size(tensor->dtype);
        npattn_put(&header, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [", tensor->name, tensor->dtype);
        for (int i = 0; i < tensor->rank; i++)
            npattn_put(&header, "%s%zu", i ? ", " : "", tensor->shape[i]);
        npattn_put(&header, "], \"data_offsets\": [%zu, %zu]}", begin, end);
    }
    npattn_put(&header, "}");
    while (header.size % 8)
        npattn_put(&header, " ");
    npattn_write_length(8 + header.size + end);
    npattn_write_length(header.size);
    fwrite(header.bytes, 1, header.size, stdout);
    for (int n = 0; n < frame->count; n++) {
        const npattn_tensor *tensor = &frame->tensors[n];
        fwrite(tensor->data, npattn_item_size(tensor->dtype), tensor->count, stdout);
    }
    if (fflush(stdout))
        npattn_die("the judge has closed its end");
}

/* --- a call: arguments and results ------------------------------------------------------------ */

typedef struct {
    npattn_json *arguments; /* "call" or "backward" of the message */
    npattn_frame *frame;
    npattn_frame results; /* one is the answer, several are a tuple */
} npattn_call;

/* Return an argument by position or, if there are fewer, by name; NULL if it is missing or null. */
static npattn_json *npattn_argument(npattn_call *call, int position, const char *name)
{
    npattn_json *entry = npattn_get(call->arguments, "positional");
    entry = entry ? entry->first : NULL;
    while (entry && position-- > 0)
        entry = entry->next;
    if (entry)
        return entry->type == NPATTN_NULL ? NULL : entry;
    return npattn_get(npattn_get(call->arguments, "keywords"), name);
}

static npattn_tensor *npattn_array(npattn_call *call, int position, const char *name)
{
    npattn_json *argument = npattn_argument(call, position, name);
    npattn_json *arrays = npattn_get(call->frame->message, "arrays");
    const char *tensor;
    if (!argument)
        return NULL;
    if (!npattn_get(argument, "array"))
        npattn_raise("TypeError", "%s is no array", name);
    tensor = npattn_get_text(npattn_get(arrays, npattn_get_text(argument, "array")), "tensor");
    for (int n = 0; n < call->frame->count; n++)
        if (!strcmp(call->frame->tensors[n].name, tensor))
            return &call->frame->tensors[n];
    npattn_raise("ValueError", "%s did not come", name);
    return NULL;
}

static int npattn_flag(npattn_call *call, const char *name)
{
    npattn_json *argument = npattn_argument(call, NPATTN_TENSORS, name);
    if (argument && argument->type != NPATTN_BOOL)
        npattn_raise("TypeError", "%s must be True or False", name);
    return argument && argument->number != 0;
}

static double npattn_number(npattn_call *call, const char *name, double otherwise)
{
    npattn_json *argument = npattn_argument(call, NPATTN_TENSORS, name);
    if (argument && npattn_get(argument, "number"))
        npattn_raise("ValueError", "%s is %s, must be finite", name, npattn_get_text(argument, "number"));
    if (argument && argument->type != NPATTN_NUMBER)
        npattn_raise("TypeError", "%s must be a number", name);
    return argument ? argument->number : otherwise;
}

/* Add a result, and return its elements, all zero. */
static void *npattn_result(npattn_call *call, const char *name, const char *dtype, int rank, const size_t *shape)
{
    npattn_tensor *tensor = &call->results.tensors[call->results.count++];
    tensor->name = name;
    tensor->dtype = dtype;
    tensor->rank = rank;
    tensor->count = 1;
    for (int i = 0; i < rank; i++)
        tensor->count *= tensor->shape[i] = shape[i];
    tensor->data = npattn_alloc(tensor->count * npattn_item_size(dtype));
    return tensor->data;
}

/* --- the loop --------------------------------------------------------------------------------- */

typedef void npattn_kernel(npattn_call *call);

static void npattn_put_results(npattn_writer *answer, const npattn_frame *results)
{
    npattn_put(answer, results->count == 1 ? "\"value\": " : "\"value\": {\"tuple\": [");
    for (int n = 0; n < results->count; n++)
        npattn_put(answer, "%s{\"tensor\": \"%s\"}", n ? ", " : "", results->tensors[n].name);
    npattn_put(answer, results->count == 1 ? "" : "]}");
}

static void npattn_put_error(npattn_writer *answer, const char *phase)
{
    npattn_put(answer, "\"raised\": {\"type\": \"%s\", \"module\": \"builtins\", ", npattn_kind);
    npattn_put(answer, "\"bases\": [\"%s\", \"Exception\"], \"during\": \"%s\", ", npattn_kind, phase);
    npattn_put(answer, "\"message\": ");
    npattn_put_text(answer, npattn_text);
    npattn_put(answer, "}");
}

/* Answer requests until the judge closes its end; `description` is the members of the answer to "describe". */
static int npattn_serve(const char *description, npattn_kernel *forward, npattn_kernel *backward)
{
    static npattn_frame frame;
    static npattn_call call;
    static npattn_writer answer;
    static const char *request;
    static int differentiates; /* static: a longjmp leaves them as they are */
    while (npattn_read(&frame)) {
        npattn_json *id = npattn_get(frame.message, "id");
        request = npattn_get_text(frame.message, "do");
        differentiates = !strcmp(request, "gradients");
        memset(&call, 0, sizeof call);
        memset(&answer, 0, sizeof answer);
        call.frame = &frame;
        call.arguments = npattn_get(frame.message, differentiates ? "backward" : "call");
        npattn_put(&answer, "{\"id\": %.0f, ", id ? id->number : 0.0);
        if (setjmp(npattn_failure)) {
            call.results.count = 0;
            npattn_put_error(&answer, differentiates ? "backward" : "forward");
        } else if (!strcmp(request, "describe")) {
            npattn_put(&answer, "%s", description);
        } else if (call.arguments && (differentiates || !strcmp(request, "forward"))) {
            (differentiates ? backward : forward)(&call);
            npattn_put_results(&answer, &call.results);
        } else {
            npattn_raise("NotImplementedError", "no such request: %s", request);
        }
        npattn_put(&answer, "}");
        npattn_write(answer.bytes, &call.results);
        npattn_free_all();
    }
    return 0;
}

#endif
