/* A client of shmserve in plain C, without libraries. It requests sums and differences from the
 * model "simple", and prints them. shmserve/client/PROTOCOL.md specifies the protocol.
 *
 *     cc -o infer infer.c && ./infer RUN_DIR
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { VERSION = 3 }; /* version of the protocol */

static void fail(const char *what) {
    fprintf(stderr, "infer: %s\n", what);
    exit(1);
}

/* --- MessagePack: encoding -------------------------------------------------------------------- */

typedef struct {
    uint8_t bytes[65536];
    size_t size;
} Out;

static void put(Out *out, const void *data, size_t size) {
    if (out->size + size > sizeof out->bytes) fail("a message is too large");
    memcpy(out->bytes + out->size, data, size);
    out->size += size;
}

static void put_byte(Out *out, unsigned byte) { put(out, &(uint8_t){byte}, 1); }

static void put_array(Out *out, unsigned count) { put_byte(out, 0x90 | count); } /* up to 15 */

static void put_uint(Out *out, uint64_t value) {
    put_byte(out, 0xcf);
    for (int shift = 56; shift >= 0; shift -= 8) put_byte(out, value >> shift & 0xff);
}

static void put_text(Out *out, const char *text) {
    put_byte(out, 0xd9);
    put_byte(out, strlen(text));
    put(out, text, strlen(text));
}

static void put_bytes(Out *out, const void *data, size_t size) {
    put_byte(out, 0xc5);
    put_byte(out, size >> 8);
    put_byte(out, size & 0xff);
    put(out, data, size);
}

/* --- MessagePack: decoding -------------------------------------------------------------------- */

typedef struct {
    const uint8_t *at, *end;
} In;

typedef struct {
    char kind; /* 'i' integer, 's' text, 'b' bytes, 'a' array, 'm' map, '-' anything else */
    uint64_t value; /* the integer, or the number of bytes or elements */
    const uint8_t *data;
} Item;

static uint64_t take_big_endian(In *in, int size) {
    uint64_t value = 0;
    if (in->end - in->at < size) fail("a message ends early");
    while (size--) value = value << 8 | *in->at++;
    return value;
}

static Item take(In *in) {
    unsigned byte = take_big_endian(in, 1);
    Item item = {'-', 0, NULL};
    if (byte < 0x80 || byte >= 0xe0) item = (Item){'i', (uint64_t)(int8_t)byte, NULL};
    else if (byte < 0x90) item = (Item){'m', byte & 15, NULL};
    else if (byte < 0xa0) item = (Item){'a', byte & 15, NULL};
    else if (byte < 0xc0) item = (Item){'s', byte & 31, NULL};
    else if (byte >= 0xc4 && byte <= 0xc6) item = (Item){'b', take_big_endian(in, 1 << (byte - 0xc4)), NULL};
    else if (byte == 0xca || byte == 0xcb) take_big_endian(in, byte == 0xca ? 4 : 8);
    else if (byte >= 0xcc && byte <= 0xcf) item = (Item){'i', take_big_endian(in, 1 << (byte - 0xcc)), NULL};
    else if (byte >= 0xd0 && byte <= 0xd3) item = (Item){'i', take_big_endian(in, 1 << (byte - 0xd0)), NULL};
    else if (byte >= 0xd9 && byte <= 0xdb) item = (Item){'s', take_big_endian(in, 1 << (byte - 0xd9)), NULL};
    else if (byte == 0xdc || byte == 0xdd) item = (Item){'a', take_big_endian(in, byte == 0xdc ? 2 : 4), NULL};
    else if (byte == 0xde || byte == 0xdf) item = (Item){'m', take_big_endian(in, byte == 0xde ? 2 : 4), NULL};
    if (item.kind == 's' || item.kind == 'b') {
        if ((uint64_t)(in->end - in->at) < item.value) fail("a message ends early");
        item.data = in->at;
        in->at += item.value;
    }
    return item;
}

static Item take_kind(In *in, char kind) {
    Item item = take(in);
    if (item.kind != kind) fail("a message has an unexpected type");
    return item;
}

static void skip(In *in, uint64_t count) {
    while (count--) {
        Item item = take(in);
        if (item.kind == 'a') skip(in, item.value);
        if (item.kind == 'm') skip(in, 2 * item.value);
    }
}

static int is(Item item, const char *text) {
    return item.value == strlen(text) && !memcmp(item.data, text, item.value);
}

static void copy_text(char *to, size_t room, Item item) {
    if (item.value >= room) fail("a text is too long");
    memcpy(to, item.data, item.value);
    to[item.value] = 0;
}

/* --- sockets --------------------------------------------------------------------------------- */

static int connect_to(const char *path, int type) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) fail("the path of a socket is too long");
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, type, 0);
    if (fd < 0 || connect(fd, (void *)&address, sizeof address)) fail("there is no server");
    return fd;
}

static void send_all(int fd, const void *data, size_t size) {
    if (send(fd, data, size, MSG_NOSIGNAL) != (ssize_t)size) fail("nothing can be sent to the server");
}

static void receive_all(int fd, void *data, size_t size) {
    for (uint8_t *at = data; size;) {
        ssize_t got = read(fd, at, size);
        if (got <= 0) fail("the server has closed the connection");
        at += got;
        size -= got;
    }
}

/* --- the listener: the client's identity, and the model's endpoint ---------------------------- */

static char identity[128], scheduler[256];

static int welcome(int listener) {
    static uint8_t data[1 << 20];
    Out out = {.size = 0};
    put_array(&out, 2), put_uint(&out, VERSION);
    put_array(&out, 2), put_text(&out, "Hello"), put_uint(&out, VERSION);
    send_all(listener, out.bytes, out.size);
    for (;;) {
        ssize_t size = recv(listener, data, sizeof data, 0);
        if (size <= 0) fail("the server has closed the connection");
        In in = {data, data + size};
        uint64_t count = take_kind(&in, 'a').value;
        skip(&in, 1); /* the version */
        while (--count) {
            In message = in;
            skip(&in, 1);
            take_kind(&message, 'a');
            Item tag = take_kind(&message, 's');
            if (is(tag, "Welcome")) {
                uint64_t number = take_kind(&message, 'i').value;
                char token[64];
                copy_text(token, sizeof token, take_kind(&message, 's'));
                snprintf(identity, sizeof identity, "%llu.%s.1", (unsigned long long)number, token);
            } else if (is(tag, "Refused")) { /* the server has another version of the protocol */
                skip(&message, 2);
                Item text = take_kind(&message, 's');
                fprintf(stderr, "infer: %.*s\n", (int)text.value, text.data);
                exit(1);
            } else if (is(tag, "ModelPublished")) {
                int ours = is(take_kind(&message, 's'), "simple");
                skip(&message, 3); /* version, config, metadata */
                Item endpoint = take_kind(&message, 's');
                skip(&message, 1); /* ready */
                int latest = message.at < message.end && *message.at == 0xc3;
                if (ours && latest) copy_text(scheduler, sizeof scheduler, endpoint);
            } else if (is(tag, "HealthChanged")) {
                return *scheduler != 0;
            }
        }
    }
}

/* --- ZMTP 3.0, as a DEALER ------------------------------------------------------------------- */

static size_t receive_frame(int fd, uint8_t *data, size_t room) {
    uint8_t head[9];
    for (;;) {
        uint64_t size = 0;
        receive_all(fd, head, 2);
        if (head[0] & 2) {
            receive_all(fd, head + 2, 7);
            for (int i = 1; i < 9; i++) size = size << 8 | head[i];
        } else {
            size = head[1];
        }
        if (size > room) fail("a response is too large");
        receive_all(fd, data, size);
        if (!(head[0] & 4)) return size;
        if (size >= 6 && !memcmp(data, "\5READY", 6)) return 0;
    }
}

static void send_frame(int fd, int flags, const uint8_t *data, size_t size) {
    Out out = {.size = 0};
    put_byte(&out, flags | 2);
    for (int shift = 56; shift >= 0; shift -= 8) put_byte(&out, (uint64_t)size >> shift & 0xff);
    put(&out, data, size);
    send_all(fd, out.bytes, out.size);
}

static void put_property(Out *out, const char *name, const char *value) {
    put_byte(out, strlen(name)), put(out, name, strlen(name));
    put(out, (uint8_t[]){0, 0, 0, strlen(value)}, 4), put(out, value, strlen(value));
}

static int greet(const char *path) {
    uint8_t greeting[64] = {[0] = 0xff, [9] = 0x7f, [10] = 3}, response[1024];
    int fd = connect_to(path, SOCK_STREAM);
    memcpy(greeting + 12, "NULL", 4);
    send_all(fd, greeting, sizeof greeting);
    receive_all(fd, response, sizeof greeting);
    Out ready = {.size = 0};
    put(&ready, "\5READY", 6);
    put_property(&ready, "Socket-Type", "DEALER");
    put_property(&ready, "Identity", identity);
    send_frame(fd, 4, ready.bytes, ready.size);
    receive_frame(fd, response, sizeof response);
    return fd;
}

/* --- a request and its response -------------------------------------------------------------- */

static void put_tensor(Out *out, const char *name) {
    put_array(out, 3), put_text(out, name), put_text(out, "INT32");
    put_array(out, 2), put_uint(out, 1), put_uint(out, 16);
}

static void submit(int fd, const int32_t a[16], const int32_t b[16]) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    Out schema = {.size = 0}; /* equal for all requests to this model */
    put_array(&schema, 3);
    put_array(&schema, 2), put_tensor(&schema, "INPUT0"), put_tensor(&schema, "INPUT1");
    put_array(&schema, 0), put_byte(&schema, 0x80); /* all outputs, no parameters */

    Out out = {.size = 0};
    put_array(&out, 2), put_uint(&out, VERSION);
    put_array(&out, 8), put_text(&out, "Submit");
    put_uint(&out, 7), put_bytes(&out, schema.bytes, schema.size); /* id, schema */
    put_array(&out, 2), put_bytes(&out, a, 16 * sizeof *a), put_bytes(&out, b, 16 * sizeof *b); /* little-endian */
    put_uint(&out, now.tv_sec * 1000000000ull + now.tv_nsec);
    for (int i = 0; i < 3; i++) put_uint(&out, 0); /* deadline, timeout, priority */
    send_frame(fd, 0, out.bytes, out.size);
}

static void print_outputs(Item schema, In *in) {
    In described = {schema.data, schema.data + schema.value};
    take_kind(&described, 'a'); /* outputs and parameters */
    uint64_t left = take_kind(&described, 'a').value;
    if (take_kind(in, 'a').value != left) fail("a response's data do not match its schema");
    while (left--) {
        char name[64];
        take_kind(&described, 'a');
        copy_text(name, sizeof name, take_kind(&described, 's'));
        skip(&described, 2); /* datatype and shape */
        Item data = take_kind(in, 'b');
        printf("%s", name);
        for (uint64_t at = 0; at + 4 <= data.value; at += 4) {
            int32_t value;
            memcpy(&value, data.data + at, 4);
            printf(" %d", value);
        }
        printf("\n");
    }
}

int main(int argc, char **argv) {
    static uint8_t response[1 << 16];
    char path[256];
    int32_t a[16], b[16];
    if (argc != 2) fail("usage: infer RUN_DIR");
    snprintf(path, sizeof path, "%s/guests/door", argv[1]);
    int listener = connect_to(path, SOCK_SEQPACKET);
    if (!welcome(listener)) fail("there is no model \"simple\"");

    int link = greet(scheduler + strlen("ipc://"));
    for (int i = 0; i < 16; i++) a[i] = i, b[i] = 1;
    submit(link, a, b);
    In in = {response, response};
    in.end += receive_frame(link, response, sizeof response);
    take_kind(&in, 'a'), skip(&in, 1), take_kind(&in, 'a');
    Item tag = take_kind(&in, 's');
    uint64_t number = take_kind(&in, 'i').value;
    if (is(tag, "Finished") && number == 7) {
        Item schema = take_kind(&in, 'b');
        print_outputs(schema, &in);
    } else if (is(tag, "Failed")) {
        Item code = take_kind(&in, 's'), text = take_kind(&in, 's');
        fprintf(stderr, "%.*s: %.*s\n", (int)code.value, code.data, (int)text.value, text.data);
        return 2;
    } else {
        fail("the message is not a response");
    }
    close(link), close(listener); /* the server releases everything when the connection ends */
    return 0;
}
